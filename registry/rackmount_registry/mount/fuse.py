"""Trace once, fuse along the edges: textbook code in, fused step out.

Today's edge: a sum that a norm reads becomes one `add_rms_norm`; where one side of the sum comes
from a row-parallel product, the reduction over its ranks moves into the fused operation, so that a
kernel may do all three.
"""

import operator

from torch import Tensor, fx, nn

from rackmount_registry.axes import Group
from rackmount_registry.nn.norm import Norm
from rackmount_registry.nn.param import Param
from rackmount_registry.nn.socket import Socket, reduce_over


class SocketTracer(fx.Tracer):
    """Sockets are leaves; everything else is read through."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Socket)


class ReduceAddNorm(nn.Module):
    """(x, residual) -> (norm(sum of x over ranks + residual), the sum itself)."""

    def __init__(self, norm: Norm, groups: tuple[Group, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.groups = groups

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = reduce_over(self.groups, x)
        return self.norm.ops.add_rms_norm(x, residual, self.norm.scale.tensor, self.norm.eps)


def fuse(model: nn.Module) -> fx.GraphModule:
    """The fused step of `model`, whose sockets are bound. Marks sockets whose reduction has moved
    as `deferred`."""
    graph = SocketTracer().trace(model)
    traced = fx.GraphModule(model, graph)
    for number, node in enumerate(list(graph.nodes)):
        if _adds_rows(traced, node) and (norm := _first_norm(traced, node)) is not None:
            _fuse_add_norm(traced, node, norm, f"add_norm_{number}")
    graph.lint()
    traced.recompile()
    return traced


def _adds_rows(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` is a sum of two activations; `x += y` is traced as one too."""
    if node.op != "call_function" or node.target is not operator.add:
        return False
    return all(
        isinstance(arg, fx.Node)
        and arg.op != "get_attr"
        and not isinstance(_module(traced, arg), Param)
        for arg in node.args
    )


def _first_norm(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    for user in node.users:
        if type(_module(traced, user)) is Norm:  # a subclass may compute something else
            return user
    return None


def _module(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _fuse_add_norm(traced: fx.GraphModule, add: fx.Node, norm_node: fx.Node, name: str) -> None:
    residual, x = add.args
    assert isinstance(residual, fx.Node) and isinstance(x, fx.Node)
    if _reduces_here(traced, residual, add):
        residual, x = x, residual
    groups: tuple[Group, ...] = ()
    if _reduces_here(traced, x, add):
        producer = _module(traced, x)
        assert isinstance(producer, Socket)
        groups, producer.deferred = producer.pending, True
    norm = _module(traced, norm_node)
    assert isinstance(norm, Norm)
    traced.add_submodule(name, ReduceAddNorm(norm, groups))
    with traced.graph.inserting_after(add):
        both = traced.graph.call_module(name, (x, residual))
    with traced.graph.inserting_after(both):
        total = traced.graph.call_function(operator.getitem, (both, 1))
        normed = traced.graph.call_function(operator.getitem, (both, 0))
    add.replace_all_uses_with(total)
    norm_node.replace_all_uses_with(normed)
    traced.graph.erase_node(norm_node)
    traced.graph.erase_node(add)


def _reduces_here(traced: fx.GraphModule, node: fx.Node, add: fx.Node) -> bool:
    """Whether `node` is a socket's share of a sum that `add` alone reads, and once. `deferred`
    holds for every call of the socket, so this must be its only one."""
    producer = _module(traced, node)
    if not isinstance(producer, Socket) or not producer.pending:
        return False
    calls = [n for n in node.graph.nodes if n.op == node.op and n.target == node.target]
    return len(calls) == 1 and set(node.users) == {add} and add.args.count(node) == 1
