"""Fuse a traced model along its edges: textbook code in, fused step out.

The edges:
- a sum that a norm reads becomes one `add_rms_norm`. Where one side of the sum comes from a
  row-parallel product, the reduction over its ranks moves into the fused operation, so that a
  kernel may do all three; where it comes from a whole product whose kernel can add, that may.
- `silu(gate) * up` of one merged product moves into its kernel, if that can.
- where a norm or `silu(gate) * up` is read by one product alone, whose kernel rounds its input, the
  kernel makes it rounded in the same pass.
- where experts read the norm that follows a product's `add`, norm and router of few tokens are one
  `norm_gate`, if that and `gate` come from one op set.
"""

import operator

from torch import Tensor, fx, nn

from rackmount_registry.axes import Group
from rackmount_registry.formats import Rounded
from rackmount_registry.mount.trace import module_of
from rackmount_registry.nn.experts import Experts
from rackmount_registry.nn.linear import Gemm, Linear, MergedLinear
from rackmount_registry.nn.mlp import SiluMul
from rackmount_registry.nn.norm import Norm
from rackmount_registry.nn.param import Param
from rackmount_registry.nn.socket import Socket, reduce_over
from rackmount_registry.ops import NORM_GATE_TOKENS


class ReduceAddNorm(nn.Module):
    """(x, residual) -> (norm(sum of x over ranks + residual), the sum itself)."""

    reader: Gemm | None = None
    """The product that alone reads the norm, and can round it."""

    def __init__(self, norm: Norm, groups: tuple[Group, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.groups = groups

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor | Rounded, Tensor]:
        return self.norm.of_sum(reduce_over(self.groups, x), residual, self.reader)


class GemmAddNorm(nn.Module):
    """(x, residual) -> (norm(product of x + residual), the sum itself)."""

    reader: Gemm | None = None
    """The product that alone reads the norm, and can round it."""

    def __init__(self, gemm: Gemm, norm: Norm) -> None:
        super().__init__()
        self.gemm = gemm
        self.norm = norm
        gemm.uses = ("run", "add")

    def forward(self, x: Tensor | Rounded, residual: Tensor) -> tuple[Tensor | Rounded, Tensor]:
        if self.gemm.adds(len(x)):
            total = self.gemm.add(x, residual)
            return self.norm.of(total, self.reader), total
        return self.norm.of_sum(self.gemm(x), residual, self.reader)


class GemmAddNormExperts(nn.Module):
    """(x, residual) -> (norm(product of x + residual), the sum itself, the experts of the norm)."""

    def __init__(self, fused: GemmAddNorm, experts: Experts) -> None:
        super().__init__()
        self.gemm, self.norm, self.experts = fused.gemm, fused.norm, experts
        experts.norm_eps = self.norm.eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ops, norm = self.norm.ops, (self.norm.scale.tensor, self.norm.eps)
        if not self.gemm.adds(len(x)):
            normed, total = ops.add_rms_norm(self.gemm(x), residual, *norm)
            return normed, total, self.experts(normed)
        total = self.gemm.add(x, residual)
        if len(total) > NORM_GATE_TOKENS:
            normed = ops.rms_norm(total, *norm)
            return normed, total, self.experts(normed)
        normed, routed = self.experts.after_norm(total, *norm)
        return normed, total, routed


class GemmSiluMul(nn.Module):
    """x -> silu(first part) * second part of one product."""

    reader: Gemm | None = None
    """The product that alone reads the result, and can round it."""

    def __init__(self, gemm: Gemm) -> None:
        super().__init__()
        self.gemm = gemm
        gemm.uses = ("silu_mul",)

    def forward(self, x: Tensor | Rounded) -> Tensor | Rounded:
        if self.reader is not None and self.reader.rounds(len(x)):
            gate, up = self.gemm(x).chunk(2, -1)
            return self.reader.round_silu_mul(gate, up)
        return self.gemm.silu_mul(x)


def fuse(traced: fx.GraphModule) -> None:
    """Fuses a traced model, whose sockets are bound. Marks sockets whose reduction has moved as
    `deferred`."""
    for number, node in enumerate(list(traced.graph.nodes)):
        if _adds_rows(traced, node) and (norm := _first_norm(traced, node)) is not None:
            _fuse_add_norm(traced, node, norm, f"add_norm_{number}")
        elif (merged := _activated_product(traced, node)) is not None:
            _fuse_silu_mul(traced, merged, node, f"gemm_silu_mul_{number}")
    for number, node in enumerate(list(traced.graph.nodes)):
        if type(module_of(traced, node)) is Experts:
            _fuse_router(traced, node, f"norm_experts_{number}")
    for node in traced.graph.nodes:
        _round_for_reader(traced, node)
    traced.graph.lint()
    traced.recompile()


def _fuse_router(traced: fx.GraphModule, node: fx.Node, name: str) -> None:
    """Puts experts, called here alone, into the module whose norm they read."""
    experts = module_of(traced, node)
    assert isinstance(experts, Experts)
    ops = getattr(experts, "ops", None)  # benchmarks fuse models that are not bound
    if not hasattr(ops, "norm_gate") or not _is_only_call(node) or node.kwargs:
        return
    (normed,) = node.all_input_nodes
    if normed.target is not operator.getitem or normed.args[1] != 0:
        return
    (both,) = normed.all_input_nodes
    if type(fused := module_of(traced, both)) is not GemmAddNorm:
        return
    traced.add_submodule(name, GemmAddNormExperts(fused, experts))
    both.target = name
    with traced.graph.inserting_after(both):
        routed = traced.graph.call_function(operator.getitem, (both, 2))
    node.replace_all_uses_with(routed)
    traced.graph.erase_node(node)


def _adds_rows(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` is a sum of two activations; `x += y` is traced as one too."""
    if node.op != "call_function" or node.target is not operator.add:
        return False
    return all(
        isinstance(arg, fx.Node)
        and arg.op != "get_attr"
        and not isinstance(module_of(traced, arg), Param)
        for arg in node.args
    )


def _first_norm(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    # A subclass may compute something else.
    norms = (user for user in node.users if type(module_of(traced, user)) is Norm)
    return next(norms, None)


def _fuse_add_norm(traced: fx.GraphModule, add: fx.Node, norm_node: fx.Node, name: str) -> None:
    residual, x = add.args
    assert isinstance(residual, fx.Node) and isinstance(x, fx.Node)
    if _reduces_here(traced, residual, add) or _gemm_that_adds(traced, residual, add):
        residual, x = x, residual
    norm = module_of(traced, norm_node)
    assert isinstance(norm, Norm)
    product: fx.Node | None = None
    fused: nn.Module = ReduceAddNorm(norm, ())
    if (gemm := _gemm_that_adds(traced, x, add)) is not None:
        product, fused = x, GemmAddNorm(gemm, norm)
        (x,) = product.args
    elif _reduces_here(traced, x, add):
        producer = module_of(traced, x)
        assert isinstance(producer, Socket)
        producer.deferred = True
        fused = ReduceAddNorm(norm, producer.pending)
    traced.add_submodule(name, fused)
    with traced.graph.inserting_after(add):
        both = traced.graph.call_module(name, (x, residual))
    with traced.graph.inserting_after(both):
        total = traced.graph.call_function(operator.getitem, (both, 1))
        normed = traced.graph.call_function(operator.getitem, (both, 0))
    add.replace_all_uses_with(total)
    norm_node.replace_all_uses_with(normed)
    for gone in (norm_node, add, product):
        if gone is not None:
            traced.graph.erase_node(gone)


def _reduces_here(traced: fx.GraphModule, node: fx.Node, add: fx.Node) -> bool:
    """Whether `node` is a socket's share of a sum that `add` alone reads, and once. `deferred`
    holds for every call of the socket, so this must be its only one."""
    producer = module_of(traced, node)
    if not isinstance(producer, Socket) or not producer.pending:
        return False
    return _is_only_call(node) and _read_once(node, add)


def _gemm_that_adds(traced: fx.GraphModule, node: fx.Node, add: fx.Node) -> Gemm | None:
    """The product that `node` is, where `add` alone reads it and its kernel can add."""
    producer = module_of(traced, node)
    if type(producer) is not Linear or producer.pending or not _read_once(node, add):
        return None
    return producer.gemm if "add" in producer.gemm.epilogues else None


def _is_only_call(node: fx.Node) -> bool:
    calls = [n for n in node.graph.nodes if n.op == node.op and n.target == node.target]
    return calls == [node]


def _read_once(node: fx.Node, reader: fx.Node) -> bool:
    return set(node.users) == {reader} and reader.args.count(node) == 1


def _activated_product(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The merged product whose two parts, read by nothing else, are what the activation `node`
    takes in order, if the kernel can do the activation."""
    if type(module_of(traced, node)) is not SiluMul:
        return None
    parts = node.args
    if any(
        not isinstance(part, fx.Node) or part.target is not operator.getitem or len(part.users) > 1
        for part in parts
    ):
        return None
    sources = [part.args for part in parts if isinstance(part, fx.Node)]
    product = sources[0][0]
    if sources != [(product, 0), (product, 1)] or not isinstance(product, fx.Node):
        return None
    merged = module_of(traced, product)
    if type(merged) is not MergedLinear or len(merged.gemms) != 1 or len(product.users) != 2:
        return None
    gemm = merged.gemms[0]
    equal_halves = len(gemm.sizes) == 2 and gemm.sizes[0] == gemm.sizes[1]
    return product if equal_halves and "silu_mul" in gemm.epilogues else None


def _fuse_silu_mul(traced: fx.GraphModule, merged: fx.Node, act: fx.Node, name: str) -> None:
    socket = module_of(traced, merged)
    assert isinstance(socket, MergedLinear)
    traced.add_submodule(name, GemmSiluMul(socket.gemms[0]))
    with traced.graph.inserting_after(act):
        fused = traced.graph.call_module(name, merged.args)
    act.replace_all_uses_with(fused)
    for node in (act, *act.all_input_nodes, merged):
        traced.graph.erase_node(node)


def _round_for_reader(traced: fx.GraphModule, node: fx.Node) -> None:
    """Tells the module behind `node` which product alone reads it, if that one can round it."""
    module, result = module_of(traced, node), node
    match module:
        case ReduceAddNorm() | GemmAddNorm():
            prologue = "norm"
            result = next(user for user in node.users if user.args[1] == 0)
        case GemmSiluMul() | SiluMul():
            prologue = "silu_mul"
        case Norm() if type(module) is Norm:
            prologue = "norm"
        case _:
            return
    reader = _sole_reader(traced, result)
    if not _is_only_call(node) or reader is None or prologue not in reader.prologues:
        return
    module.reader = reader
    if isinstance(module, GemmSiluMul):
        module.gemm.uses = ("run", "silu_mul")  # the reader rounds what `run` gives


def _sole_reader(traced: fx.GraphModule, node: fx.Node) -> Gemm | None:
    """The product whose input `node` is, if nothing else reads it."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    match module_of(traced, user):
        case MergedLinear(gemms=[gemm]) | Linear(gemm=gemm) | GemmSiluMul(gemm=gemm):
            return gemm
        case GemmAddNorm(gemm=gemm) if user.args[0] is node and user.args[1] is not node:
            return gemm
    return None
