"""Behind the last layer in which tokens see each other, only the tokens that are asked for.

A step writes keys and values of all its tokens, and samples from few: of a prompt, from the last.
Behind the last attention the other rows have no reader: the output projection and the feed-forward
block of the last layer, a thirtieth of a prefill, run for the wanted rows alone.
"""

import operator

from torch import Tensor, fx, nn

from rackmount_registry.mount.trace import module_of
from rackmount_registry.nn.linear import MergedLinear
from rackmount_registry.nn.socket import Socket
from rackmount_registry.step import Step, wanted_rows

POINTWISE = frozenset({operator.add, operator.sub, operator.mul, operator.truediv, operator.neg})


class Wanted(nn.Module):
    """[T, ...] -> the rows that the step wants."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return wanted_rows(self.step, x)


def keep_wanted(traced: fx.GraphModule, step: Step) -> None:
    """Cuts a traced model, before it is fused, down to the rows that `step` wants: behind the last
    socket that is not `by_row`, or at its end where anything unknown follows that. Marks sockets
    behind the cut."""
    traced.add_submodule("wanted", Wanted(step))
    nodes = list(traced.graph.nodes)
    place, values = _early_cut(traced, nodes) or (nodes[-2], nodes[-1].all_input_nodes)
    behind = set(nodes[nodes.index(place) + 1 :])
    for value in values:
        with traced.graph.inserting_after(place):
            kept = traced.graph.call_module("wanted", (value,))
        value.replace_all_uses_with(kept, behind.__contains__)
    for node in behind:
        if isinstance(socket := module_of(traced, node), Socket):
            socket.cut = True
    traced.graph.lint()
    traced.recompile()


def _early_cut(
    traced: fx.GraphModule, nodes: list[fx.Node]
) -> tuple[fx.Node, list[fx.Node]] | None:
    """The node behind which each row of every value follows from the same row alone, and the values
    from before it that are read there; None where that is certain of no node."""
    place: fx.Node | None = None
    varying: set[fx.Node] = set()  # all but parameters
    per_token: set[fx.Node] = set()  # those that surely have a row for each token
    for node in nodes[:-1]:
        sources = varying.intersection(node.all_input_nodes)
        if node.op == "placeholder":
            place = node
        elif not sources:
            continue
        elif not _is_by_row(traced, node):
            place = node if isinstance(module_of(traced, node), Socket) else None
        varying.add(node)
        if place is not None and (node is place or sources <= per_token):
            per_token.add(node)
    if place is None:
        return None
    end = nodes.index(place) + 1
    behind = set(nodes[end:])
    if {n.target for n in behind} & {n.target for n in nodes[:end] if n.op == "call_module"}:
        return None  # a socket that is called on both sides
    values = [n for n in nodes[:end] if n in varying and not behind.isdisjoint(n.users)]
    if all(n in per_token and not _is_tuple(traced, n) for n in values):
        return place, values
    return None


def _is_by_row(traced: fx.GraphModule, node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_tuple(traced, node.all_input_nodes[0])
    module = module_of(traced, node)
    return node.target in POINTWISE or (isinstance(module, Socket) and module.by_row)


def _is_tuple(traced: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(module_of(traced, node), MergedLinear)
