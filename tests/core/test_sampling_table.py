"""What a step asks of the host: which rows reach the device, and when."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rackmount.sampling import table as module
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import reference_ops
from rackmount_registry.sampling import Draw

V = 50
PLAIN = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1)


def new(size: int = 4) -> tuple[SamplingTable, Sampler]:
    table = SamplingTable(size, V, torch.device("cpu"))
    return table, Sampler(table, reference_ops())


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What the table sends to the device."""
    sent: list[np.ndarray] = []

    def upload(array: np.ndarray, device: torch.device) -> Tensor:
        sent.append(array)
        return torch.from_numpy(array)

    monkeypatch.setattr(module, "upload", upload)
    return sent


def test_a_flush_brings_all_admitted_rows_in_one_copy(uploads: list[np.ndarray]) -> None:
    table, _ = new()
    table.flush()
    assert not uploads
    table.admit(2, PLAIN, seed=2**64 - 3, prompt_token_ids=[0])
    table.admit(0, SamplingParams(top_p=0.5), seed=7, prompt_token_ids=[0])
    assert table.state.draws.tolist() == [0] * 5
    table.flush()
    table.flush()
    assert len(uploads) == 1
    assert table.state.draws.tolist() == [Draw.TOP_P, 0, Draw.TOP_K, 0, 0]
    assert table.state.seeds.tolist() == [7, 0, -3, 0, 0]
    assert table.state.numbers[[0, 2]].tolist() == [
        [1, V, 0.5, -math.inf],
        [0.5, 4, 0.9, math.log(0.1)],
    ]


def test_a_row_given_to_another_request_has_that_ones_parameters_alone() -> None:
    table, _ = new()
    before = [each.data_ptr() for each in vars(table.state).values()]
    table.admit(1, PLAIN, seed=1, prompt_token_ids=[0])
    table.flush()
    table.admit(1, PLAIN, seed=2, prompt_token_ids=[0])
    table.release(1)
    table.admit(1, SamplingParams(temperature=0), seed=3, prompt_token_ids=[0])
    table.flush()
    assert table.state.draws.tolist() == [Draw.GREEDY] * 5
    assert [each.data_ptr() for each in vars(table.state).values()] == before, "graphs read them"


def test_a_row_released_before_it_was_sent_is_not_sent(uploads: list[np.ndarray]) -> None:
    table, _ = new()
    table.admit(1, PLAIN, seed=1, prompt_token_ids=[0])
    table.release(1)
    table.flush()
    assert not uploads


def test_history_is_needed_for_bad_words_of_several_tokens_alone() -> None:
    table, sampler = new()
    asks = SamplingParams(logit_bias={1: 2.0}, presence_penalty=1, min_tokens=3)
    table.admit(0, asks, seed=0, prompt_token_ids=[0], bad_words_ids=[[3], [4]], stop_ids=[1])
    table.admit(1, asks, seed=0, prompt_token_ids=[0], bad_words_ids=[[3], [4, 5]])
    assert not sampler.needs_history(np.array([0, 2, 4]))
    assert sampler.needs_history(np.array([0, 1]))
    table.release(1)
    assert not sampler.needs_history(np.array([0, 1]))


@pytest.mark.parametrize(
    "asks",
    [{"logit_bias": {1: 1.0}}, {"frequency_penalty": 0.5}, {"logprobs": 0}],
    ids=lambda asks: next(iter(asks)),
)
def test_rows_are_plain_unless_one_asks_for_something(asks: dict[str, object]) -> None:
    table, sampler = new()
    for row in range(3):
        table.admit(row, PLAIN, seed=0, prompt_token_ids=[0])
    table.admit(3, SamplingParams(**asks), seed=0, prompt_token_ids=[0])
    padded = np.array([0, 1, 2, 4, 4])
    assert sampler.is_plain(padded)
    assert not sampler.is_plain(np.array([0, 3, 4]))
    logits = torch.zeros(5, V).bfloat16()
    ones, history = np.ones(5, int), np.zeros((4, 8), int)
    assert sampler.process(logits, padded, ones, history) is logits
    assert sampler.finish(torch.zeros(5).int()) is None
    assert logits.eq(0).all()


def test_rows_behind_those_named_stay_as_they_are() -> None:
    """As in a batch that was padded for a graph."""
    table, sampler = new()
    asks = SamplingParams(logit_bias={1: 1.0}, presence_penalty=1, logprobs=1, temperature=0)
    for row in range(2):
        table.admit(row, asks, seed=0, prompt_token_ids=[0])
    table.flush()
    logits = torch.arange(4.0)[:, None].expand(4, V).bfloat16()
    rows, positions = np.array([1, 0]), np.array([1, 1])
    processed = sampler.process(logits, rows, positions, np.zeros((4, 8), int))
    assert processed.dtype == torch.float32
    assert processed[:, 1].tolist() == [1, 2, 2, 3]
    sampled = sampler.draw(processed, torch.tensor([1, 0, 4, 4]), torch.zeros(4).long())
    assert sampled.tolist() == [1, 1, 0, 0]
    logprobs = sampler.finish(sampled)
    assert logprobs is not None
    assert logprobs.token_ids.tolist() == [[1, 0], [1, 0]]
    again = sampler.process(logits.clone(), rows, positions, np.zeros((4, 8), int))
    assert again[:2, 1].tolist() == [0, 1], "the sampled tokens were counted"


def test_a_row_without_a_token_disturbs_no_count_of_another() -> None:
    table, sampler = new()
    for row in range(2):
        table.admit(row, SamplingParams(presence_penalty=1), seed=0, prompt_token_ids=[0])
    rows, ones = np.arange(2), np.ones(2, int)
    sampler.process(torch.zeros(2, V), rows, ones, np.zeros((4, 8), int))
    sampler.finish(torch.tensor([-1, 5], dtype=torch.int32))
    after = sampler.process(torch.zeros(2, V), rows, ones, np.zeros((4, 8), int))
    assert after.nonzero().tolist() == [[0, 0], [1, 5]]
