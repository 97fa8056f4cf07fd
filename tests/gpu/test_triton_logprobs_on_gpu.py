"""Triton's `logprobs`, compiled, against its definition on the same GPU."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rackmount_backends.triton_ops.logprobs import logprobs
from rackmount_registry import ops

pytestmark = pytest.mark.gpu

V = 151936
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(num_rows, vocab_size, device="cuda", generator=generator) * scale


def targets(num_rows: int, vocab_size: int) -> Tensor:
    return torch.arange(num_rows, device="cuda") * 7919 % vocab_size


def check(logits: Tensor, num: int) -> Tensor:
    """Gives the log-probabilities, which are as close to float64's as float32 allows; the
    definition's sum of a whole vocabulary may be less so."""
    token_ids = targets(*logits.shape)
    ids, values, ranks = logprobs(logits, token_ids, num)
    expected_ids, expected, expected_ranks = ops.logprobs(logits, token_ids, num)
    assert torch.equal(ids, expected_ids) and torch.equal(ranks, expected_ranks)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=3e-5, equal_nan=True)
    wide = logits.double().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(values.double(), wide, rtol=1e-6, atol=4e-6, equal_nan=True)
    return values


@pytest.mark.parametrize("num", [0, 1, 20])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(64, V), (1, 128256), (35, 50257), (7, 262144), (28, 97)]
)
def test_they_are_those_of_the_definition(
    num_rows: int, vocab_size: int, dtype: torch.dtype, scale: float, num: int
) -> None:
    check(normal(num_rows, vocab_size, scale).to(dtype), num)


def test_all_of_a_vocabulary_may_be_listed() -> None:
    check(normal(3, 5003, 2.0).bfloat16(), 5003)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan_are_as_defined(dtype: torch.dtype) -> None:
    logits = normal(8, V, 2.0).to(dtype)
    logits[0] = -math.inf
    logits[1, 10:] = -math.inf
    logits[2, 77777] = math.inf
    logits[3, 77777] = math.nan
    logits[4] = math.nan
    logits[5, 4096:] = -math.inf  # whole programs
    values = check(logits, 20)
    assert values[[0, 2, 3, 4]].isnan().all() and not values[[1, 5, 6, 7]].isnan().any()


def test_a_row_gives_the_same_alone_and_in_any_batch() -> None:
    """As a prompt in chunks does, whose tokens begin anywhere."""
    logits, token_ids = normal(66, V, 2.0).bfloat16(), targets(66, V)
    whole = logprobs(logits, token_ids, 5)
    for size in (1, 7):
        pieces = zip(logits.split(size), token_ids.split(size), strict=True)
        found = zip(*(logprobs(*piece, 5) for piece in pieces), strict=True)
        for got, expected in zip(found, whole, strict=True):
            assert torch.equal(torch.cat(got), expected)


def test_it_takes_no_memory_of_the_size_of_the_logits() -> None:
    logits, token_ids = normal(64, V, 2.0).bfloat16(), targets(64, V)
    logprobs(logits, token_ids, 5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs(logits, token_ids, 5)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 20
