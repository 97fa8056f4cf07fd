"""Triton's `penalize` against its definition, and against sums by hand, in Triton's interpreter."""

import math

import pytest
import torch
from torch import Tensor

from rackmount_backends.triton_ops import penalties
from rackmount_registry import ops
from rackmount_registry.ops import IN_PROMPT

INF = math.inf
FACTORS = [
    (1.0, 0.0, 0.0),
    (1.3, 0.0, 0.0),
    (0.01, -2.0, 2.0),
    (1.0, 0.37, 0.0),
    (1.0, 0.0, -1.7),
    (100.0, 0.1, 0.2),
    (1.0, 0.0, 0.0),
]
"""Of six rows, two of them neutral, and a padding row."""
COUNTS = [0, IN_PROMPT, 1, IN_PROMPT + 1, 3, IN_PROMPT + 77, 2**31 - 1, -1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a row."""
    monkeypatch.setattr(penalties, "BLOCK", 64)


def factors() -> Tensor:
    return torch.tensor(FACTORS, dtype=torch.float64)


def counts(size: int) -> Tensor:
    """Of every kind beside each other, and none for half of the tokens."""
    generator = torch.Generator().manual_seed(size)
    kinds = torch.randint(2 * len(COUNTS), (len(FACTORS), size), generator=generator)
    return torch.tensor(COUNTS + [0] * len(COUNTS), dtype=torch.int32)[kinds]


def normal(num_rows: int, size: int) -> Tensor:
    logits = 5 * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(1))
    tiny = torch.finfo(torch.float32).tiny / 4
    odd = torch.tensor([0.0, -0.0, tiny, -tiny, INF, -INF, math.nan, 3e38])
    logits[:, : len(odd)] = odd[:size]
    return logits


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 64, 97, 331])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # to inf, as it should
def test_logits_are_those_of_the_definition(size: int, integers: torch.dtype) -> None:
    """Bit for bit, in a view of a wider tensor, whose other columns stay."""
    rows = torch.tensor([3, 5, 0, 2, 1, 4, 6, 6], dtype=integers)
    wide = normal(len(rows), size + 3)
    logits, expected = wide[:, :size], wide.clone()
    ops.penalize(expected[:, :size], rows, factors(), counts(size))
    before = wide.clone()
    penalties.penalize(logits, rows, factors(), counts(size))
    assert torch.equal(wide.view(torch.int32), expected.view(torch.int32))
    neutral = torch.isin(rows, torch.tensor([0, 6]))
    same = (wide.view(torch.int32) == before.view(torch.int32)).all(-1)
    assert same[neutral].all() and (size == 1 or not same[~neutral].any())


def test_logits_are_those_of_a_sum_by_hand() -> None:
    size = 97
    rows, found = torch.arange(len(FACTORS)), counts(size)
    logits = 5 * torch.randn(len(rows), size, generator=torch.Generator().manual_seed(1))
    expected = logits.double()
    for row, (repetition, frequency, presence) in enumerate(FACTORS):
        for token, count in enumerate(found[row].tolist()):
            value, outputs = float(logits[row, token]), count & (2**31 - 1)
            if count:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * outputs + (presence if outputs else 0)
            expected[row, token] = value
    penalties.penalize(logits, rows, factors(), found)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)


def test_no_row_changes_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    penalties.penalize(torch.zeros(0, 97), nothing, factors(), counts(97))
