"""The Triton expert kernel in the interpreter, against float64."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.experts import (
    CHOICES,
    FORMATS,
    defined_experts,
    expert_bundle,
    expert_choices,
    expert_tokens,
)
from tests.helpers.interpreter import last_program_first, mend_loops
from torch import Tensor

from rackmount_moe.triton_experts import align, combine, experts, launches, product, vector
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.table import Plan, Tiling
from rackmount_registry.device.ahead import AheadCompiler
from rackmount_registry.experts import ExpertBundle, ExpertInput, ExpertUse

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 5, 72, 40, 2
HALF = 1e-3
"""What rounding to half precision costs."""
TILING = Tiling(block_n=32, block_k=32, stages=2, warps=4)
FEW = Plan(Tiling(32, 64, 1, 4), Tiling(32, 32, 1, 4))
STEPS = Plan(Tiling(64, 32, 8, 4), Tiling(32, 32, 8, 4))
BLOCKS = Plan(TILING, replace(TILING, block_n=64), block_m=16)
PLANS = {
    "few": FEW,
    "few, all steps on their way": STEPS,
    "few, all columns at once": Plan(Tiling(16, 128, 1, 4), Tiling(64, 64, 1, 4)),
    "blocks": BLOCKS,
    "blocks, programs for several tiles": replace(
        BLOCKS, gate_up=replace(TILING, programs=3), down=replace(TILING, programs=2)
    ),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels loop in the interpreter, and what nobody writes is not a number."""
    mend_loops(monkeypatch)
    torch.manual_seed(0)

    def empty(*size: object, dtype: torch.dtype, **options: object) -> Tensor:
        value = torch.nan if dtype.is_floating_point else -7
        return torch.full(*size, value, dtype=dtype, **options)

    for module in (experts, launches, align):
        monkeypatch.setattr(module.torch, "empty", empty)


def bundle(
    name: str = "dense",
    hidden: int = HIDDEN,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> ExpertBundle:
    return expert_bundle(name, NUM_EXPERTS, hidden, width, dtype)


def tokens(count: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> ExpertInput:
    return expert_tokens(count, NUM_EXPERTS, hidden, TOP_K, dtype)


def run(plan: Plan, given: ExpertInput, layer: ExpertBundle, tolerance: float = 2e-6) -> Tensor:
    """The layer's output, held to float64."""
    kernel = TritonExperts(lambda *_: plan)
    prepared = kernel.prepare(layer)
    out = kernel.run(given, prepared)
    assert out.dtype == given.x.dtype
    wide = defined_experts(given, layer)
    scale = float(wide.abs().max()) if wide.numel() else 0.0
    torch.testing.assert_close(out.double(), wide, rtol=tolerance * 10, atol=tolerance * scale)
    return out


@pytest.mark.parametrize("plan", [FEW, STEPS, BLOCKS], ids=["few", "steps", "blocks"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_sum_of_each_tokens_experts(name: str, plan: Plan) -> None:
    """Inputs are rounded to half precision between the products and after them, weights never."""
    half = torch.float16
    run(plan, tokens(2, dtype=half), bundle(name, dtype=half), HALF)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("count", [0, 1, 4])
def test_every_plan_gives_it_for_any_number_of_tokens(plan: Plan, count: int) -> None:
    run(plan, tokens(count), bundle())


@pytest.mark.parametrize("plan", [FEW, STEPS, BLOCKS], ids=["few", "steps", "blocks"])
@pytest.mark.parametrize(("hidden", "width"), [(16, 16), (50, 7), (33, 130)])
def test_sizes_need_not_fill_tiles(plan: Plan, hidden: int, width: int) -> None:
    run(plan, tokens(2, hidden), bundle("dense", hidden, width))


@pytest.mark.parametrize("plan", [FEW, STEPS], ids=["few", "steps"])
@pytest.mark.parametrize("name", ["int4_groups", "fp8_blocks", "int8_groups with zeros"])
@pytest.mark.parametrize(("count", "choices"), [(1, 3), (3, 1)])
def test_choices_need_not_be_a_power_of_two(
    name: str, plan: Plan, count: int, choices: int
) -> None:
    """Of weights of several blocks, the last one cut off."""
    half = torch.float16
    hidden, width = (144, 136) if name == "fp8_blocks" else (80, 72)
    given = expert_tokens(count, NUM_EXPERTS, hidden, choices, half)
    run(plan, given, bundle(name, hidden, width, dtype=half), HALF)


@pytest.mark.parametrize("plan", [FEW, STEPS], ids=["few", "steps"])
@pytest.mark.parametrize(
    "name", ["int4_groups", "int4_groups with zeros, in another order", "fp8_blocks"]
)
def test_few_tokens_lose_nothing_to_how_values_are_unpacked(name: str, plan: Plan) -> None:
    """What 4-bit values are offset by comes off again, though tokens be far from 0."""
    given = tokens(2)
    given.x.add_(3)
    run(plan, given, bundle(name), 2e-5)


@pytest.mark.parametrize("name", ["fp8_blocks", "int4_groups of rows"])
def test_the_up_rows_begin_blocks_and_packed_words_of_their_own(name: str) -> None:
    run(BLOCKS, tokens(2, 144, torch.float16), bundle(name, 144, 136), HALF)


@pytest.mark.parametrize("plan", [FEW, STEPS, BLOCKS], ids=["few", "steps", "blocks"])
@pytest.mark.parametrize("expert", [-1, 2])
def test_all_tokens_may_choose_one_expert_or_none(plan: Plan, expert: int) -> None:
    given = tokens(6)
    given.expert_ids[:] = -1
    given.expert_ids[:, 1] = expert
    given.weights[:, 1] = 0.5
    out = run(plan, given, bundle())
    assert bool(out.any()) == (expert >= 0)


@settings(max_examples=12, deadline=None, derandomize=True)
@given_any(
    name=st.sampled_from(list(FORMATS)),
    plan=st.sampled_from(list(PLANS)),
    choices=st.sampled_from(CHOICES),
    count=st.integers(0, 6),
    top_k=st.integers(1, NUM_EXPERTS),
    sizes=st.sampled_from([(HIDDEN, WIDTH), (16, 16), (33, 24)]),
    seed=st.integers(0, 99),
)
def test_any_tokens_and_choices_give_the_sum(
    name: str, plan: str, choices: str, count: int, top_k: int, sizes: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    given = expert_choices(choices, count, NUM_EXPERTS, sizes[0], top_k, torch.float16)
    run(PLANS[plan], given, bundle(name, *sizes, dtype=torch.float16), HALF)


@pytest.mark.parametrize("block_m", [16, 128])
def test_more_tokens_than_a_block_holds_fill_several(block_m: int) -> None:
    """Blocks of 128 that are less than half full, too, and some that are not."""
    given = tokens(70)
    given.expert_ids[:, 0], given.weights[:, 0] = 4, 0.5
    run(replace(BLOCKS, block_m=block_m), given, bundle())


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
def test_programs_come_in_any_order(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given = bundle(), tokens(3)
    forward = run(plan, given, layer)
    last_program_first(monkeypatch)
    assert torch.equal(run(plan, given, layer), forward)


@pytest.mark.parametrize("plan", [FEW, BLOCKS], ids=["few", "blocks"])
def test_a_token_gets_the_same_whatever_the_others_hold(plan: Plan) -> None:
    layer, given = bundle(), tokens(4)
    out = run(plan, given, layer)
    given.x[[0, 1, 3]] = torch.nan
    kernel = TritonExperts(lambda *_: plan)
    assert torch.equal(kernel.run(given, kernel.prepare(layer))[2], out[2])


def test_kernels_wait_before_the_next_one_may_start() -> None:
    """What the second product relies on as it reads experts before it waits."""
    for module, count in ((product, 2), (vector, 2), (align, 2), (combine, 1)):
        source = inspect.getsource(module)
        assert source.count("gdc_wait()\n") == source.count("gdc_launch_dependents()\n") == count
        assert source.count("gdc_wait()\n        gdc_launch_dependents()\n") == count


def test_what_is_compiled_ahead_takes_no_more_memory_than_some_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many a plan is for: weights are loading meanwhile."""
    lengths = list[int]()

    def start(self: AheadCompiler, kernel: object, key: object, arguments: dict[str, Any]) -> None:
        lengths.extend(len(each) for each in arguments.values() if isinstance(each, Tensor))

    def choose(gate_up: object, down: object, bucket: int) -> Plan:
        return replace(BLOCKS, gate_up=replace(TILING, programs=bucket))

    monkeypatch.setattr(AheadCompiler, "start", start)
    TritonExperts(choose).prepare(bundle(), ExpertUse(top_k=TOP_K, dtype=torch.float16))
    assert align.SEGMENTS[-1] < max(lengths) <= align.SEGMENTS[-1] + TOP_K
