"""What is chosen for a model with experts on a GPU, without one."""

from typing import Any

import pytest
from tests.helpers.mounting import plugins

from rackmount_registry.capabilities import Demand
from rackmount_registry.descriptors import ExpertKernel, OpSet, TokenDispatcher
from rackmount_registry.selection import choose, choose_experts

H200 = Demand(device="cuda", compute_capability=(9, 0), dtype="bfloat16", num_ranks=1)


def demand(**others: Any) -> Demand:
    return Demand(**(vars(H200) | others))


@pytest.mark.parametrize(
    "weight_format", ["dense", "fp8_rows", "fp8_blocks", "int4_groups", "int8_groups"]
)
def test_a_gpu_gets_parts_that_can_be_captured(weight_format: str) -> None:
    pair = choose_experts(
        plugins().offers(ExpertKernel),
        plugins().offers(TokenDispatcher),
        demand(weight_format=weight_format),
    )
    assert (pair.kernel.name, pair.dispatcher.name) == ("triton", "local")
    offering = [offer for offer in plugins().offers(OpSet) if "gate" in offer.descriptor.ops]
    router = choose(OpSet.kind, offering, H200).require()
    assert router.name == "triton-router"
    assert all(it.descriptor.graph_safe for it in (pair.kernel, pair.dispatcher, router))


def test_a_cpu_gets_the_reference() -> None:
    pair = choose_experts(
        plugins().offers(ExpertKernel),
        plugins().offers(TokenDispatcher),
        Demand(device="cpu", dtype="float32", weight_format="int4_groups"),
    )
    assert pair.kernel.name == "torch"
