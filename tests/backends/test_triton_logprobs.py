"""Triton's `logprobs` against its definition, and against float64, in Triton's interpreter."""

import math
from collections.abc import Iterator

import pytest
import torch
from tests.helpers.interpreter import mend_loops
from torch import Tensor

from rackmount_backends.triton_ops import logprobs as module
from rackmount_registry import ops

NAN, INF = math.nan, math.inf
NUM = 5


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen; and a small vocabulary is in
    many parts, of which a program holds few."""
    mend_loops(monkeypatch)
    monkeypatch.setattr(module, "PART", 16)
    monkeypatch.setattr(module, "PARTS", 4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(num_rows: int, size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


def check(logits: Tensor, num: int = NUM, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Of row i the token `first` + 7 i, around the vocabulary."""
    token_ids = (torch.arange(len(logits)) * 7 + first) % logits.shape[1]
    before = logits.clone()
    found = module.logprobs(logits, token_ids, num)
    expected = ops.logprobs(logits, token_ids, num)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=2e-6, equal_nan=True)
    kept = logits.float().nan_to_num(123.0), before.float().nan_to_num(123.0)
    assert torch.equal(*kept)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "num"), [(1, 0), (1, 1), (64, 0), (97, 1), (23, 23), (331, 20)])
def test_they_are_those_of_the_definition(size: int, num: int, dtype: torch.dtype) -> None:
    """Of a view of a wider tensor."""
    check(normal(NUM, size + 5).to(dtype)[:, :size], num)


def test_they_are_those_of_float64() -> None:
    logits = normal(NUM, 331)
    ids, values, ranks = check(logits)
    wide = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), wide.gather(1, ids), rtol=1e-6, atol=2e-6)
    assert torch.equal(ids[:, 1:], wide.topk(NUM).indices)
    assert torch.equal(ranks, (wide > wide.gather(1, ids[:, :1])).sum(-1) + 1)


def test_equals_share_a_rank_and_are_listed_by_id() -> None:
    logits = normal(2, 97).mul_(0.5).round_()
    for first in (0, 30, 96):
        check(logits, 30, first)
    signs = torch.where(torch.arange(97) % 2 == 0, 0.0, -0.0)
    ids, _, ranks = check(signs[None], 40)
    assert ids[0, 1:].tolist() == list(range(40)) and ranks.tolist() == [1]


def test_logits_that_differ_less_than_their_log_probabilities_can_keep_their_order() -> None:
    logits = torch.full((1, 97), -20.0)
    logits[0, 3], logits[0, 90] = 0.0, 20.0
    logits[0, 40] = torch.tensor(0.0).nextafter(torch.tensor(1.0))
    ids, values, ranks = check(logits, 3, first=3)
    assert ids.tolist() == [[3, 90, 40, 3]] and ranks.tolist() == [3]
    assert values[0, 0] == values[0, 2]


def test_banned_tokens_come_last_by_id() -> None:
    logits = torch.full((1, 97), -INF)
    logits[:, [3, 40, 96]] = normal(1, 3)
    ids, values, _ = check(logits, 97, first=1)
    assert ids[0, 4:].tolist() == [id for id in range(97) if id not in (3, 40, 96)]
    assert (values[:, 4:] == -INF).all() and values[:, 1:4].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN is meant
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_a_row_that_is_no_distribution_has_nan_and_disturbs_no_other(bad: float) -> None:
    logits = normal(4, 97)
    good = check(logits)
    logits[1, 50] = bad
    logits[2] = bad if math.isnan(bad) else -INF
    logits[3, 21] = bad  # the token itself
    ids, values, ranks = check(logits)
    assert values[1:].isnan().all()
    for found, expected in zip((ids, values, ranks), good, strict=True):
        assert torch.equal(found[0], expected[0])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # to -inf, as it should
def test_extreme_logits_have_log_probabilities() -> None:
    big = torch.finfo(torch.float32).max
    logits = torch.full((1, 97), -INF)
    logits[0, [0, 17, 96]] = torch.tensor([-big, big / 2, big])
    _, values, _ = check(logits, 3)
    assert values[0, 1] == 0.0


def test_a_row_gives_the_same_alone_and_in_any_batch() -> None:
    logits = normal(5, 331)
    token_ids = torch.arange(5) * 31
    whole = module.logprobs(logits, token_ids, 3)
    for size in (1, 3):
        pieces = zip(logits.split(size), token_ids.split(size), strict=True)
        found = zip(*(module.logprobs(*piece, 3) for piece in pieces), strict=True)
        for got, expected in zip(found, whole, strict=True):
            assert torch.equal(torch.cat(got), expected)


def test_no_row_gives_nothing() -> None:
    ids, values, ranks = check(torch.zeros(0, 97), 3)
    assert ids.shape == values.shape == (0, 4) and ranks.shape == (0,)
