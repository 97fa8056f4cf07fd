"""The choice of compute parts for a draft."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.memory import draft_module
from tests.helpers.mounting import chosen_parts, plugins
from torch import nn

from rackmount_backends import plugin as backends
from rackmount_moe import plugin as moe
from rackmount_moe.local import LocalDispatcher
from rackmount_moe.torch_experts import TorchExperts
from rackmount_quant.w8 import INT8_ROWS
from rackmount_registry import hookimpl
from rackmount_registry.axes import Axis, Cut, Mesh, Solo
from rackmount_registry.capabilities import Cell, Demand
from rackmount_registry.descriptors import LinearKernel, OpSet
from rackmount_registry.errors import PluginError, SelectionError
from rackmount_registry.experts import DispatchContext
from rackmount_registry.formats import StoredFormat
from rackmount_registry.mount import Draft, assemble, select_parts
from rackmount_registry.nn import Attention, Embedding, Experts, GatedMLP, Linear, Norm, Routing
from rackmount_registry.ops import OPS, STEP_OPS
from rackmount_registry.plugins import PluginManager
from rackmount_registry.step import ReferenceStep

CPU = Demand(device="cpu", dtype="float32")


def dense() -> Draft:
    return draft_module(lambda: nn.Sequential(Linear(4, 4)), dtype=torch.float32)


def normed() -> Draft:
    return draft_module(lambda: nn.Sequential(Norm(4, 1e-6)), dtype=torch.float32)


def sparse(mesh: Mesh | None = None) -> Draft:
    experts, ffn, routing = Axis("experts", 6), Axis("expert_ffn", 8), Routing(top_k=2)
    return draft_module(
        lambda: nn.Sequential(Experts(4, experts, ffn, routing)), dtype=torch.bfloat16, mesh=mesh
    )


class Everything(nn.Module):
    """A model of every socket."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        heads, ffn = Axis("heads", 2, 4), Axis("ffn", 8)
        self.embed = Embedding(Axis("vocab", 8), 8)
        self.norm = Norm(8, 1e-6)
        self.attn = Attention(heads, heads, rope=None)
        self.mlp = GatedMLP(8, ffn)
        if sparse:
            self.moe = Experts(8, Axis("experts", 2), Axis("expert_ffn", 4), Routing(top_k=1))


def test_only_what_the_draft_needs_is_chosen() -> None:
    choice = select_parts(plugins(), dense(), CPU)
    assert (choice.ops.keys(), choice.linear.keys()) == (set(STEP_OPS), {"dense"})
    assert not choice.experts
    choice = select_parts(plugins(), sparse(), CPU)
    assert (choice.ops.keys(), choice.experts.keys()) == (
        {"gate", "norm_gate", *STEP_OPS},
        {"dense"},
    )


def test_every_operation_that_the_models_sockets_use_is_bound() -> None:
    ops = vars(chosen_parts(draft_module(Everything)).ops)
    assert ops.keys() == set(OPS)
    assert all(callable(op) for op in ops.values())
    ops = vars(chosen_parts(draft_module(lambda: Everything(sparse=False))).ops)
    assert ops.keys() == set(OPS) - {"gate", "norm_gate"}


def test_an_op_set_need_not_have_what_no_socket_uses() -> None:
    manager = PluginManager.from_modules(
        {"rackmount-plugins-backends": some_plugin(tuple(set(OPS) - {"gate"}))}
    )
    draft = draft_module(lambda: Everything(sparse=False), dtype=torch.float32)
    assert not hasattr(select_parts(manager, draft, CPU).load().ops, "gate")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dispatcher_is_told_its_layers_experts_sizes_and_place(rank: int) -> None:
    told: list[DispatchContext] = []

    def dispatcher(context: DispatchContext) -> LocalDispatcher:
        told.append(context)
        return LocalDispatcher(context)

    group = Solo(rank, 2)
    drafted = sparse(Mesh(groups={"experts": group}))
    parts = replace(chosen_parts(drafted), expert_parts={"dense": (TorchExperts(), dispatcher)})
    device = torch.device("cpu")
    assemble(drafted, parts, ReferenceStep(), device=device, max_positions=1)
    assert told == [
        DispatchContext(
            num_experts=6,
            local_experts=Cut(3 * rank, 3 * rank + 3),
            group=group,
            top_k=2,
            hidden_size=4,
            dtype=torch.bfloat16,
            device=device,
        )
    ]


def test_layers_of_one_format_share_a_kernel_and_have_a_dispatcher_each() -> None:
    experts, ffn, routing = Axis("experts", 6), Axis("expert_ffn", 8), Routing(top_k=2)
    drafted = draft_module(
        lambda: nn.Sequential(*(Experts(4, experts, ffn, routing) for _ in range(2)))
    )
    assemble(
        drafted,
        chosen_parts(drafted),
        ReferenceStep(),
        device=torch.device("cpu"),
        max_positions=1,
    )
    one, other = drafted.experts
    assert one.kernel is other.kernel and one.dispatcher is not other.dispatcher


def test_a_demand_that_no_kernel_meets_is_refused_when_it_is_loaded() -> None:
    choice = select_parts(plugins(), normed(), Demand(device="tpu", dtype="float32"))
    with pytest.raises(SelectionError, match=r"no op_set fits: .*torch .*device=tpu is not one of"):
        choice.load()


def test_a_part_asked_for_by_name_is_refused_at_once_if_it_does_not_serve() -> None:
    with pytest.raises(SelectionError, match=r"dequantize .*weight_format=dense is not one of"):
        select_parts(plugins(), dense(), CPU, requested={"linear_kernel": "dequantize"})


def test_a_kernel_asked_for_serves_the_formats_that_it_takes_and_auto_the_rest() -> None:
    class Some:
        kv_cache = None

        def format_for(self, name: str, *rest: object) -> StoredFormat | None:
            return INT8_ROWS if name == "0" else None

    both = draft_module(
        lambda: nn.Sequential(Linear(4, 4), Linear(4, 4)),
        dtype=torch.float32,
        scheme=Some(),  # type: ignore[arg-type]
    )
    choice = select_parts(plugins(), both, CPU, requested={"linear_kernel": "dequantize"})
    assert choice.linear["int8_rows"].require().name == "dequantize"
    assert choice.linear["int8_rows"].why == "requested"
    assert choice.linear["dense"].require().name == "torch"
    assert choice.linear["dense"].why.startswith("dequantize does not take it; ")


TORCH_OPS = "rackmount_backends.torch_ops:TORCH_OPS"


def some_plugin(ops: tuple[str, ...], factory: str = TORCH_OPS) -> SimpleNamespace:
    """Offers an op set that says to have `ops`, and a kernel."""
    cells = (Cell(),)

    @hookimpl
    def op_sets() -> list[OpSet]:
        return [OpSet(name="mine", factory=factory, band="vendor", cells=cells, ops=ops)]

    @hookimpl
    def linear_kernels() -> list[LinearKernel]:
        dense = "rackmount_backends.torch_linear:DenseLinear"
        return [LinearKernel(name="mine", factory=dense, band="vendor", cells=cells)]

    return SimpleNamespace(op_sets=op_sets, linear_kernels=linear_kernels)


def test_a_router_of_ones_own_is_not_passed_over() -> None:
    """By an operation of another op set that has its own."""
    mine = some_plugin(tuple(set(OPS) - {"norm_gate"}))
    manager = PluginManager.from_modules(
        {"rackmount-plugins-backends": backends, "rackmount-plugins-moe": moe, "mine": mine}
    )
    for name, offers in (("mine", False), ("torch", True)):
        choice = select_parts(manager, sparse(), CPU, requested={OpSet.kind: name})
        assert choice.ops["gate"].require().name == name
        assert ("norm_gate" in choice.ops) is offers


def broken_plugin() -> SimpleNamespace:
    @hookimpl
    def op_sets() -> None:
        return None

    return SimpleNamespace(op_sets=op_sets)


def test_a_failed_choice_names_the_broken_plugins() -> None:
    manager = PluginManager.from_modules(
        {"rackmount-plugins-backends": some_plugin(OPS[:1]), "broken": broken_plugin()}
    )
    choice = select_parts(manager, normed(), CPU)
    with pytest.raises(SelectionError, match=r"no op_set fits: none is mounted.*Broken .*broken 0"):
        choice.load()


def test_an_op_set_that_lacks_what_it_offers_is_refused_by_name() -> None:
    plugin = some_plugin(OPS, factory="rackmount_registry.axes:Solo")
    manager = PluginManager.from_modules({"rackmount-plugins-backends": plugin})
    with pytest.raises(PluginError, match=r"op_set 'mine' .* offers rms_norm, and .* has none"):
        select_parts(manager, normed(), CPU).load()


@pytest.mark.parametrize("kind", ["expert_kernel", "token_dispatcher"])
def test_a_part_for_experts_is_refused_where_there_are_none(kind: str) -> None:
    with pytest.raises(SelectionError, match=f"{kind}='torch' was asked for, and the model has no"):
        select_parts(plugins(), dense(), CPU, requested={kind: "torch"})
