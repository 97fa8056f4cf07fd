"""The router in Triton against its definition and against float64, in the interpreter."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import last_program_first
from tests.helpers.routing import ROUTINGS, all_by_hand, fresh_state, random_bias, routers
from torch import Tensor

from rackmount_moe.triton_router import router
from rackmount_moe.triton_router.router import gate, norm_gate
from rackmount_registry import ops
from rackmount_registry.experts import ROUTER_ARRIVALS, Routing
from rackmount_registry.ops import NORM_GATE_TOKENS

# The interpreter cuts bfloat16 off instead of rounding it; the GPU's tests have it.
DTYPES = (torch.float32, torch.float16)
HIDDEN = 72


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["one launch", "two launches"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two launches":
        monkeypatch.setattr(router, "FEW_TOKENS", 0)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slots_of(num_tokens: int) -> Tensor:
    """Every third token, from the second on, is padding."""
    return torch.tensor([-1 if t % 3 == 1 else t for t in range(num_tokens)], dtype=torch.int32)


def assert_defined(
    x: Tensor, weight: Tensor, routing: Routing, bias: Tensor | None, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Equal to the definition, twice in a row; gives ids and weights."""
    state, plain = fresh_state(len(weight)), fresh_state(len(weight))
    for _ in range(2):
        ids, weights = gate(x, weight, routing, bias, slots, state)
        expected, exact = ops.gate(x, weight, routing, bias, slots, plain)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert torch.equal(ids, expected)
        kept = slots >= 0
        torch.testing.assert_close(weights[kept], exact[kept], rtol=1e-5, atol=1e-30)
        assert torch.equal(state.load, plain.load)
        assert not state.arrivals.any()
    return ids, weights


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("case", ROUTINGS)
def test_the_router_equals_its_definition(case: str, num_tokens: int, dtype: torch.dtype) -> None:
    count, routing, biased = ROUTINGS[case]
    bias = random_bias(count) if biased else None
    x, weight = randn(num_tokens, HIDDEN, dtype=dtype), randn(count, HIDDEN, seed=1, dtype=dtype)
    assert_defined(x, weight / 4, routing, bias, slots_of(num_tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, NORM_GATE_TOKENS])
@pytest.mark.parametrize("case", ROUTINGS)
def test_with_the_norm_before_it(case: str, num_tokens: int, dtype: torch.dtype) -> None:
    count, routing, biased = ROUTINGS[case]
    bias = random_bias(count) if biased else None
    x = randn(num_tokens, HIDDEN + 8, dtype=dtype)[:, :HIDDEN] * 3
    scale, weight = randn(HIDDEN, seed=2, dtype=dtype), randn(count, HIDDEN, seed=1, dtype=dtype)
    norm, slots = (scale, 1e-2), slots_of(num_tokens)
    state, plain = fresh_state(count), fresh_state(count)
    for _ in range(2):
        found = norm_gate(x, *norm, weight / 4, routing, bias, slots, state)
        expected = ops.norm_gate(x, *norm, weight / 4, routing, bias, slots, plain)
        torch.testing.assert_close(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        kept = slots >= 0
        torch.testing.assert_close(found[2][kept], expected[2][kept], rtol=1e-2, atol=1e-4)
        assert torch.equal(state.load, plain.load) and not state.arrivals.any()


def test_the_norm_is_over_whole_rows_that_programs_share() -> None:
    """In parts of 64 columns, the last one of 8."""
    count, routing, _ = ROUTINGS["qwen3"]
    x, scale = randn(3, HIDDEN) + 5, randn(HIDDEN, seed=2)
    weight, slots = randn(count, HIDDEN, seed=1), torch.arange(3)
    normed, *_ = norm_gate(x, scale, 1e-9, weight, routing, None, slots, fresh_state(count))
    wide = x.double()
    wide = wide / wide.pow(2).mean(-1, keepdim=True).sqrt() * scale
    torch.testing.assert_close(normed.double(), wide, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 5, 20])
@pytest.mark.parametrize("case", ["qwen3", "deepseek-v2, group-limited", "deepseek-v3"])
def test_the_router_equals_the_rule_in_float64(case: str, num_tokens: int) -> None:
    count, routing, biased = ROUTINGS[case]
    bias = random_bias(count) if biased else None
    x, weight = randn(num_tokens, HIDDEN, seed=7), randn(count, HIDDEN, seed=8)
    slots = torch.arange(num_tokens)
    ids, weights = gate(x, weight, routing, bias, slots, fresh_state(count))
    expected, exact = all_by_hand(x.double() @ weight.double().T, routing, bias)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-4, atol=1e-8)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", ROUTINGS)
def test_equal_scores_come_lowest_first(case: str) -> None:
    """Logits are exactly 0, -0, 1 or 2."""
    count, routing, biased = ROUTINGS[case]
    bias = torch.zeros(count) if biased else None
    weight = torch.zeros(count, HIDDEN)
    weight[:, 0] = torch.randint(3, (count,), generator=torch.Generator().manual_seed(3)).float()
    weight[-1, 0] = -0.0
    x = torch.zeros(2, HIDDEN)
    x[0, 0] = 1.0
    assert_defined(x, weight, routing, bias, torch.arange(2))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_nan_is_chosen_first_and_stays_seen(scoring: str, num_tokens: int) -> None:
    weight = torch.eye(4, HIDDEN)
    weight[2, 2] = math.nan
    x = torch.ones(num_tokens, HIDDEN)
    routing = Routing(top_k=2, scoring=scoring)
    ids, weights = gate(x, weight, routing, None, torch.arange(num_tokens), fresh_state(4))
    assert ids.tolist() == [[2, 0]] * num_tokens
    assert weights.isnan().all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(router_of=routers(5, 9), num_tokens=st.integers(0, 18), seed=st.integers(0, 99))
def test_any_router_equals_the_rule_in_float64(
    router_of: tuple[int, Routing, bool], num_tokens: int, seed: int
) -> None:
    """Logits are eighths, exact in any order, and a bias keeps scores apart."""
    count, routing, biased = router_of
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (num_tokens, 8), generator=generator).float()
    weight = torch.randint(-4, 5, (count, 8), generator=generator).float() / 8
    bias = random_bias(count, seed) if biased else None
    state = fresh_state(count)
    ids, weights = gate(x, weight, routing, bias, torch.arange(num_tokens), state)
    expected, exact = all_by_hand(x @ weight.T, routing, bias)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-12)
    assert torch.equal(state.load, torch.bincount(ids.flatten(), minlength=count))


def test_many_blocks_of_tokens_meet_at_counters_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, routing, _ = ROUTINGS["qwen3"]
    x, weight = randn(50, HIDDEN), randn(count, HIDDEN, seed=1) / 4
    assert router.FEW_TOKENS <= 16 * ROUTER_ARRIVALS
    first = assert_defined(x, weight, routing, None, slots_of(50))
    last_program_first(monkeypatch)
    for found, again in zip(
        first, assert_defined(x, weight, routing, None, slots_of(50)), strict=True
    ):
        assert torch.equal(found[slots_of(50) >= 0], again[slots_of(50) >= 0])


def test_rows_of_the_input_may_lie_apart() -> None:
    count, routing, _ = ROUTINGS["qwen3"]
    wide, weight = randn(9, HIDDEN + 8), randn(count, HIDDEN, seed=1) / 4
    for rows in (1, 9):
        assert_defined(wide[:rows, 8:], weight, routing, None, slots_of(rows))


@pytest.mark.parametrize(
    ("num_experts", "hidden", "splits"),
    [(128, 2048, 1), (256, 7168, 1), (8, 4096, 8), (60, 2048, 2), (4, 100, 1)],
)
def test_one_token_is_read_by_many_programs(num_experts: int, hidden: int, splits: int) -> None:
    tiling = router.tile(1, num_experts, hidden, 2)
    assert -(-hidden // tiling.block_h) == splits
    assert tiling.block_h * splits >= hidden


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_experts", [8, 64, 128, 256])
@pytest.mark.parametrize("hidden", [100, 2048, 4096, 7168])
def test_a_wide_tile_fits_any_multiprocessor(hidden: int, num_experts: int, itemsize: int) -> None:
    few, many = (router.tile(n, num_experts, hidden, itemsize) for n in (128, 129))
    assert few.block_e == 16
    if many.block_e > 16:
        assert (many.block_e + many.block_t) * many.block_h * itemsize <= 48 << 10
    assert (many.block_e == 64) == (
        num_experts >= 64 and (hidden <= 100 or (hidden == 2048 and itemsize == 2))
    )


def test_many_tokens_go_by_wide_tiles() -> None:
    x, weight = randn(129, HIDDEN), randn(70, HIDDEN, seed=1) / 4
    routing = Routing(top_k=3)
    assert_defined(x, weight, routing, None, slots_of(129))
