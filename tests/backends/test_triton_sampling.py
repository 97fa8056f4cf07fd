"""Triton's `sample` against its definition, in Triton's interpreter."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import mend_loops
from tests.helpers.sampling import state_of
from torch import Tensor

from rackmount.sampling.params import SamplingParams
from rackmount_backends.triton_ops import sampling
from rackmount_registry import ops
from rackmount_registry.sampling import SamplingState

NAN, INF = math.nan, math.inf

VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"min_p": 0.3, "temperature": 2.0},
    {"top_k": 2},
    {"top_k": 3, "temperature": 5.0},
    {"top_k": 60, "temperature": 0.4},
    {"top_p": 0.9},
    {"top_p": 0.02, "temperature": 3.0},
    {"top_p": 1e-300},
    {"top_p": 0.5, "min_p": 0.2},
    {"top_k": 4, "top_p": 0.6, "temperature": 3.0},
    {"top_k": 90, "top_p": 0.97, "min_p": 0.01},
]
PARAMS = [SamplingParams(**given) for given in VARIANTS]
NUM = len(PARAMS)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    mend_loops(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small vocabulary in many parts, of which a program holds few."""
    monkeypatch.setattr(sampling, "PART", 16)
    monkeypatch.setattr(sampling, "PARTS", 4)


def normal(size: int, seed: int = 0, rows: int = NUM) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def check(logits: Tensor, state: SamplingState | None = None, first: int = 5) -> list[int]:
    """Samples row i of the state from row i of the logits; gives the tokens."""
    state = state or state_of(PARAMS, logits.shape[1])
    rows = torch.arange(len(logits), dtype=torch.int32)
    positions = rows + first
    expected = ops.sample(logits.clone(), rows, positions, state)
    got = sampling.sample(logits, rows, positions, state)
    assert got.dtype == torch.int32
    assert got.tolist() == expected.tolist()
    return got.tolist()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (97, torch.float16), (1031, torch.float32), (1031, torch.bfloat16)],
)
def test_every_kind_of_draw_gives_the_token_of_the_definition(
    size: int, dtype: torch.dtype
) -> None:
    check(normal(size).to(dtype))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size", [97, 163])
def test_a_vocabulary_in_many_parts_gives_the_same_tokens(size: int) -> None:
    check(normal(size, seed=size), first=100)


@pytest.mark.usefixtures("small_parts")
def test_equals_at_the_edge_are_kept_by_lowest_id() -> None:
    check(normal(97).mul_(0.5).round_())
    check(torch.zeros(NUM, 97))
    check(torch.where(torch.arange(97) % 2 == 0, 0.0, -0.0).repeat(NUM, 1))


@pytest.mark.usefixtures("small_parts")
def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.full((NUM, 97), -INF)
    allowed = [3, 40, 41, 96]
    logits[:, allowed] = normal(4)
    assert set(check(logits)) <= set(allowed)
    logits[:] = -INF
    logits[:, 96] = -50.0
    assert set(check(logits)) == {96}


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_a_row_without_a_token_to_give_says_so_and_disturbs_no_other(bad: float) -> None:
    good = check(normal(97))
    for hit in (range(0, NUM, 2), range(1, NUM, 2)):
        logits = normal(97)
        for row in hit:
            logits[row, 50 if bad != -INF else slice(None)] = bad
        got = check(logits)
        assert got == [-1 if row in hit else token for row, token in enumerate(good)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # to -inf, as it should
def test_extreme_logits_and_temperatures_give_the_token_of_the_definition() -> None:
    big = torch.finfo(torch.float32).max
    kinds = ({}, {"top_p": 0.9}, {"top_k": 2}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.5})
    params = [
        SamplingParams(temperature=temperature, **given)
        for temperature in (1e-5, 1e300)
        for given in kinds
    ]
    logits = torch.full((len(params), 40), -INF)
    logits[:, [0, 17, 18, 39]] = torch.tensor([-big, big / 2, big, big])
    check(logits, state_of(params, 40))
    logits[:, [17, 18, 39]] = -big
    check(logits, state_of(params, 40))


def test_the_padding_row_is_greedy_however_often_it_is_named() -> None:
    state = state_of([SamplingParams(top_k=3)] * 2, 97)
    logits = normal(97, rows=3)
    got = sampling.sample(logits, torch.tensor([2, 0, 2]), torch.tensor([7, 7, 7]), state)
    assert got[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()


def test_rows_of_a_wider_tensor_and_64_bit_positions_are_taken() -> None:
    logits, state = normal(120)[:, :97], state_of(PARAMS, 97)
    rows = torch.arange(NUM).flip(0)
    positions = torch.full((NUM,), 2**40)
    expected = ops.sample(logits.clone(), rows, positions, state)
    assert sampling.sample(logits, rows, positions, state).tolist() == expected.tolist()


def test_no_row_gives_no_token() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    tokens = sampling.sample(torch.zeros(0, 97), nothing, nothing, state_of(PARAMS, 97))
    assert tokens.shape == (0,)


def test_settings_that_leave_no_token_end_with_none() -> None:
    state = state_of([SamplingParams(top_k=5)], 97)
    state.numbers[0, 1] = 0
    zero = torch.zeros(1, dtype=torch.int32)
    assert sampling.sample(normal(97, rows=1), zero, zero, state).tolist() == [-1]
