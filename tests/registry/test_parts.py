"""The choice of compute parts for a draft."""

from types import SimpleNamespace

import pytest
import torch
from tests.helpers.memory import draft_module
from tests.helpers.mounting import chosen_parts, plugins
from torch import nn

from rackmount_registry import hookimpl
from rackmount_registry.axes import Axis
from rackmount_registry.capabilities import Cell, Demand
from rackmount_registry.descriptors import LinearKernel, OpSet
from rackmount_registry.errors import PluginError, SelectionError
from rackmount_registry.mount import Draft, select_parts
from rackmount_registry.nn import Experts, Linear, Routing
from rackmount_registry.ops import OPS
from rackmount_registry.plugins import PluginManager

CPU = Demand(device="cpu", dtype="float32")


def dense() -> Draft:
    return draft_module(lambda: nn.Sequential(Linear(4, 4)), dtype=torch.float32)


def test_only_what_the_draft_needs_is_chosen() -> None:
    choice = select_parts(plugins(), dense(), CPU)
    assert (choice.ops.keys(), choice.linear.keys()) == (set(OPS), {"dense"})
    assert not choice.experts
    moe = draft_module(
        lambda: Experts(4, Axis("experts", 2), Axis("expert_ffn", 4), Routing(top_k=1))
    )
    assert select_parts(plugins(), moe, CPU).experts.keys() == {"dense"}


def test_every_operation_is_bound() -> None:
    ops = chosen_parts(dense()).ops
    assert all(callable(getattr(ops, name)) for name in OPS)


def test_a_demand_that_no_kernel_meets_is_refused_when_it_is_loaded() -> None:
    choice = select_parts(plugins(), dense(), Demand(device="tpu", dtype="float32"))
    with pytest.raises(SelectionError, match=r"no op_set fits: torch .*device=tpu is not one of"):
        choice.load()


def test_a_part_asked_for_by_name_is_refused_at_once_if_it_does_not_serve() -> None:
    with pytest.raises(SelectionError, match=r"torch-int8 .*weight_format=dense is not one of"):
        select_parts(plugins(), dense(), CPU, requested={"linear_kernel": "torch-int8"})


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


def broken_plugin() -> SimpleNamespace:
    @hookimpl
    def op_sets() -> None:
        return None

    return SimpleNamespace(op_sets=op_sets)


def test_a_failed_choice_names_the_broken_plugins() -> None:
    manager = PluginManager.from_modules(
        {"rackmount-plugins-backends": some_plugin(OPS[:2]), "broken": broken_plugin()}
    )
    choice = select_parts(manager, dense(), CPU)
    with pytest.raises(SelectionError, match=r"no op_set fits: none is mounted.*Broken .*broken 0"):
        choice.load()


def test_an_op_set_that_lacks_what_it_offers_is_refused_by_name() -> None:
    plugin = some_plugin(OPS, factory="rackmount_registry.axes:Solo")
    manager = PluginManager.from_modules({"rackmount-plugins-backends": plugin})
    with pytest.raises(PluginError, match=r"op_set 'mine' .* offers rms_norm, and .* has none"):
        select_parts(manager, dense(), CPU).load()
