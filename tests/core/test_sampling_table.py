"""What a step asks of the host: which rows reach the device, and when."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rackmount.sampling import processor as processor_module
from rackmount.sampling import table as table_module
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
    """What the table and its processors send to the device."""
    sent: list[np.ndarray] = []

    def upload(array: np.ndarray, device: torch.device) -> Tensor:
        sent.append(array)
        return torch.from_numpy(array)

    monkeypatch.setattr(table_module, "upload", upload)
    monkeypatch.setattr(processor_module, "upload", upload)
    return sent


def test_a_flush_brings_all_admitted_rows_in_one_copy(uploads: list[np.ndarray]) -> None:
    table, _ = new()
    uploads.clear()
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
    uploads.clear()
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


ASKS = [{"logit_bias": {1: 1.0}}, {"frequency_penalty": 0.5}, {"logprobs": 0}, {"min_tokens": 2}]
HISTORY = np.zeros((4, 8), int)


@pytest.mark.parametrize("asks", ASKS, ids=lambda asks: next(iter(asks)))
def test_rows_are_plain_unless_one_asks_for_something(asks: dict[str, object]) -> None:
    table, sampler = new()
    for row in range(3):
        table.admit(row, PLAIN, seed=0, prompt_token_ids=[0])
    table.admit(3, SamplingParams(**asks), seed=0, prompt_token_ids=[0], stop_ids=[4])
    sampler.prepare(np.arange(4), np.ones(4, int), HISTORY)
    plain = np.array([0, 1, 2, 4, 4])
    assert sampler.is_plain(plain)
    assert not sampler.is_plain(np.array([0, 3, 4]))
    assert sampler.logprobs(torch.zeros(5, V), plain, torch.zeros(5).int()) is None
    sampler.prepare(np.arange(4), np.full(4, 3), HISTORY)
    assert sampler.is_plain(np.array([3])) == ("min_tokens" in asks), "it is past them"
    table.release(3)
    assert sampler.is_plain(np.array([0, 3, 4]))


def test_a_row_whose_mask_has_not_changed_is_not_sent_again(uploads: list[np.ndarray]) -> None:
    table, sampler = new()
    asks = [
        (SamplingParams(allowed_token_ids=[1, 2]), []),
        (SamplingParams(min_tokens=3), [[5]]),
        (SamplingParams(), [[6, 7]]),
        (SamplingParams(logit_bias={3: 1.0}, presence_penalty=1), []),
    ]
    for row, (params, words) in enumerate(asks):
        table.admit(row, params, seed=0, prompt_token_ids=[0], bad_words_ids=words, stop_ids=[4])
    rows, history = np.arange(4), HISTORY.copy()
    sent = []
    for position in range(1, 8):
        history[2, position - 1] = 6 if position == 6 else 0
        uploads.clear()
        sampler.prepare(rows, np.full(4, position), history)
        sent.append([each[:, 0].tolist() for each in uploads])
    first, *others = sent
    assert sorted(map(sorted, first)) == [[0, 1], [0, 1, 2, 3], [3], [3]]
    assert others == [[], [], [[1]], [], [[2]], [[2]]]


def test_what_graphs_read_stays_where_it_is() -> None:
    table, sampler = new()
    found = []
    for row in (0, 3, 0, 1):
        for params in ({"presence_penalty": 1.0}, {"logit_bias": {2: 1.0}}, {"temperature": 0}):
            table.admit(row, SamplingParams(**params), seed=0, prompt_token_ids=[0, 1])
            sampler.prepare(np.array([row]), np.array([2]), HISTORY)
            tensors = (
                *(each.on_device for each in table.processors),
                table.penalties._counts,
            )
            found.append([each.data_ptr() for each in tensors])
    assert found.count(found[0]) == len(found)


def test_an_answer_takes_the_rows_in_the_order_of_the_batch() -> None:
    """And those of padding behind them come out as they were."""
    table, sampler = new()
    asks = SamplingParams(logit_bias={1: 1.0}, presence_penalty=1, logprobs=1, temperature=0)
    for row in range(2):
        table.admit(row, asks, seed=0, prompt_token_ids=[0])
    rows, positions = np.array([1, 0]), np.array([1, 1])
    sampler.prepare(rows, positions, HISTORY)
    logits = torch.arange(4.0)[:, None].expand(4, V).bfloat16()
    where = torch.tensor([1, 0, 4, 4])
    processed = sampler.process(logits, where)
    assert processed.dtype == torch.float32
    assert processed[:, 1].tolist() == [1, 2, 2, 3]
    sampled = sampler.draw_processed(logits, where, torch.zeros(4).long())
    assert sampled.tolist() == [1, 1, 0, 0]
    logprobs = sampler.logprobs(logits, rows, sampled)
    assert logprobs is not None
    assert logprobs.token_ids.tolist() == [[1, 0], [1, 0]]
    assert sampler.process(logits, where)[:2, 1].tolist() == [0, 1], "the tokens were counted"


def test_a_row_without_a_token_disturbs_no_count_of_another() -> None:
    table, sampler = new()
    for row in range(2):
        table.admit(row, SamplingParams(presence_penalty=1), seed=0, prompt_token_ids=[0])
    table.flush()
    rows = torch.arange(2)
    table.penalties.observe(rows, torch.tensor([-1, 5], dtype=torch.int32))
    assert sampler.process(torch.zeros(2, V), rows).nonzero().tolist() == [[0, 0], [1, 5]]
