"""Experts of four bits are never unpacked in memory: what lies there, and what a call asks for."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from tests.helpers.experts import defined_experts, expert_bundle, expert_tokens
from tests.helpers.footprint import Allocations, held_bytes
from tests.helpers.interpreter import mend_loops
from tests.helpers.packings import (
    Grouped,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
    random_grouped,
)
from tests.helpers.schemes import load_bundle, read_scheme
from torch import Tensor

from rackmount_moe.torch_experts import TorchExperts
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.table import Plan, Tiling
from rackmount_quant.awq import AwqScheme
from rackmount_quant.compressed_tensors import CompressedTensorsScheme
from rackmount_quant.gptq import GptqScheme
from rackmount_registry.experts import ExpertBundle, ExpertKernel
from rackmount_registry.formats import Weight

EXPERTS, HIDDEN, WIDTH, GROUP, TOP_K = 4, 256, 128, 128, 2
NUM_TOKENS = 3
ACTIVATIONS = NUM_TOKENS * TOP_K * HIDDEN * torch.float16.itemsize
"""Bytes of a row for each choice of the tokens, in the wider of both sizes."""
PLANS = {
    "few": Plan(Tiling(32, 64, 1, 4), Tiling(32, 64, 1, 4)),
    "blocks": Plan(Tiling(32, 32, 2, 4), Tiling(64, 32, 2, 4), block_m=16),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
SCHEMES: dict[str, tuple[object, Callable[[Grouped], dict[str, Tensor]], bool]] = {
    "gptq": (read_scheme(GptqScheme, GPTQ | {"desc_act": False}), gptq_tensors, False),
    "gptq, act-order": (read_scheme(GptqScheme, GPTQ | {"desc_act": True}), gptq_tensors, True),
    "awq": (read_scheme(AwqScheme, AWQ), awq_tensors, False),
    "compressed-tensors": (
        read_scheme(CompressedTensorsScheme, COMPRESSED),
        compressed_tensors,
        False,
    ),
}
"""Name -> scheme, how it stores a weight, and whether columns are in another order."""


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_loops(monkeypatch)
    torch.manual_seed(0)


def weight_of(name: str, parts: tuple[int, ...], columns: int) -> Weight:
    """A bundle as the checkpoint's scheme finishes it; parts of an expert share their order."""
    scheme, pack, act_order = SCHEMES[name]
    stored = scheme.format_for("mlp.experts.0.up_proj", (parts[0], columns), "expert")
    experts = []
    for seed in range(EXPERTS):
        make = partial(random_grouped, size=columns, group=GROUP, seed=seed)
        first = make(parts[0], act_order=act_order)
        experts.append([pack(make(part, groups=first.groups)) for part in parts])
    return load_bundle(stored, experts, parts, columns)


@cache
def layer_of(name: str) -> ExpertBundle:
    return ExpertBundle(
        gate_up=weight_of(name, (WIDTH, WIDTH), HIDDEN), down=weight_of(name, (HIDDEN,), WIDTH)
    )


def bytes_a_weight(prepared: object) -> float:
    return held_bytes(prepared) / (EXPERTS * 3 * HIDDEN * WIDTH)


def largest_of_a_run(kernel: ExpertKernel, layer: ExpertBundle) -> int:
    """Bytes of the largest tensor that `run` makes; its result is held to float64."""
    given = expert_tokens(NUM_TOKENS, EXPERTS, HIDDEN, TOP_K, torch.float16)
    prepared = kernel.prepare(layer)
    with Allocations((given, prepared)) as allocations:
        out = kernel.run(given, prepared)
    wide = defined_experts(given, layer)
    torch.testing.assert_close(out.double(), wide, rtol=0, atol=2e-3 * float(wide.abs().max()))
    return allocations.largest


@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_of_four_bits_takes_little_more(name: str) -> None:
    layer = layer_of(name)
    assert layer.gate_up.format == layer.down.format == "int4_groups"
    assert 0.5 < bytes_a_weight(TritonExperts(lambda *_: PLANS["few"]).prepare(layer)) <= 0.6


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_run_asks_for_no_more_than_its_activations(name: str, plan: str) -> None:
    kernel = TritonExperts(lambda *_: PLANS[plan])
    assert largest_of_a_run(kernel, layer_of(name)) <= ACTIVATIONS


def test_what_is_unpacked_would_be_seen() -> None:
    """Once for all in `prepare`, or an expert at a time in `run`."""
    dense = expert_bundle("dense", EXPERTS, HIDDEN, WIDTH, torch.float16)
    assert bytes_a_weight(TritonExperts(lambda *_: PLANS["few"]).prepare(dense)) == 2
    smallest = HIDDEN * WIDTH * torch.float16.itemsize
    assert largest_of_a_run(TorchExperts(), layer_of("awq")) >= smallest > 10 * ACTIVATIONS
