"""Triton's `penalize`, compiled, against its definition on the same GPU."""

import math

import pytest
import torch
from torch import Tensor

from rackmount_backends.triton_ops.penalties import penalize
from rackmount_registry import ops
from rackmount_registry.ops import IN_PROMPT

pytestmark = pytest.mark.gpu

FACTORS = [
    (1.0, 0.0, 0.0),
    (1.3, 0.0, 0.0),
    (0.01, -2.0, 2.0),
    (1.0, 0.37, 0.0),
    (1.1, 0.3, -1.7),
    (100.0, 0.1, 0.2),
]
"""Of rows in turn; the last row is padding, and neutral."""
COUNTS = [IN_PROMPT, 1, IN_PROMPT + 1, 3, IN_PROMPT + 77, 2**24 + 1, 2**31 - 1, -1]


def table(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Factors, and counts for a quarter of the tokens."""
    factors = [FACTORS[row % len(FACTORS)] for row in range(num_rows)] + [FACTORS[0]]
    generator = torch.Generator("cuda").manual_seed(num_rows)
    shape = num_rows + 1, vocab_size
    kinds = torch.randint(4 * len(COUNTS), shape, device="cuda", generator=generator)
    counts = torch.tensor(COUNTS + 3 * len(COUNTS) * [0], dtype=torch.int32, device="cuda")
    return torch.tensor(factors, dtype=torch.float64, device="cuda"), counts[kinds]


def normal(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = 5 * torch.randn(num_rows, vocab_size, device="cuda", generator=generator)
    odd = [0.0, -0.0, 1e-39, -1e-39, math.inf, -math.inf, 3e38]
    logits[:, 50 : 50 + len(odd)] = torch.tensor(odd, device="cuda")
    return logits


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 151936), (27, 151936), (64, 50257), (9, 97)]
)
def test_logits_are_bit_for_bit_those_of_the_definition(
    num_rows: int, vocab_size: int, integers: torch.dtype
) -> None:
    """Rows begin at places that are not aligned, and some are padding."""
    factors, counts = table(num_rows, vocab_size)
    rows = torch.arange(num_rows + 3, dtype=integers, device="cuda").flip(0)
    rows.clamp_(max=num_rows)
    logits = normal(num_rows + 3, vocab_size)
    expected = logits.clone()
    for start in (0, 1):
        ops.penalize(expected[start:], rows[start:], factors, counts)
        penalize(logits[start:], rows[start:], factors, counts)
    assert_same_bits(logits, expected)


def test_neutral_rows_keep_their_bits() -> None:
    """NaN of any bits among them."""
    _, counts = table(8, 50257)
    factors = torch.tensor([FACTORS[0]] * 9, dtype=torch.float64, device="cuda")
    logits = normal(8, 50257)
    logits.view(torch.int32)[:, 60] = -7
    before = logits.clone()
    penalize(logits, torch.arange(8, device="cuda"), factors, counts)
    assert_same_bits(logits, before)


def test_a_graph_follows_logits_rows_factors_and_counts() -> None:
    num_rows, vocab_size = 16, 151936
    factors, counts = table(3 * num_rows, vocab_size)
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    logits = normal(num_rows, vocab_size)
    penalize(logits, rows, factors, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        penalize(logits, rows, factors, counts)
    for step in range(5):
        logits.copy_(normal(num_rows, vocab_size, step))
        rows.add_(5)
        rows[-3:] = 3 * num_rows
        factors[:-1].copy_(factors[:-1].roll(1, 0))
        counts.copy_(counts.roll(1, 1))
        expected = logits.clone()
        ops.penalize(expected, rows, factors, counts)
        graph.replay()
        assert_same_bits(logits, expected)
