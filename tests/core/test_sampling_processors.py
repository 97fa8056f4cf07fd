"""Masks, biases and penalties: what each does to logits, in which order, and to no other row."""

import numpy as np
import pytest
import torch
from tests.helpers.sampling import sample
from torch import Tensor

from rackmount.sampling import processor
from rackmount.sampling import sampler as module
from rackmount.sampling.params import MAX_BIASES, SamplingParams
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import reference_ops

INF = float("inf")
V = 6


def process(
    params: SamplingParams,
    logits: list[float],
    prompt: tuple[int, ...] = (0,),
    outputs: tuple[int, ...] = (),
    bad_words: tuple[list[int], ...] = (),
    stop_ids: tuple[int, ...] = (),
) -> list[float]:
    """The logits of one request as they are before temperature."""
    table = SamplingTable(3, V, torch.device("cpu"))
    table.admit(
        1,
        params,
        seed=0,
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        bad_words_ids=bad_words,
        stop_ids=stop_ids,
    )
    token_ids = np.full((3, 16), -1)
    token_ids[1, : len(prompt) + len(outputs)] = prompt + outputs
    sampler = Sampler(table, reference_ops())
    sampler.prepare(np.array([1]), np.array([len(prompt) + len(outputs)]), token_ids)
    return sampler.process(torch.tensor([logits]), torch.tensor([1]))[0].tolist()


ONES = [1.0] * V


def test_only_allowed_ids_remain() -> None:
    got = process(SamplingParams(allowed_token_ids=[4, 1]), ONES)
    assert got == [-INF, 1, -INF, -INF, 1, -INF]


def test_a_bias_is_added_but_lifts_no_ban() -> None:
    params = SamplingParams(allowed_token_ids=[0, 1], logit_bias={1: 2.5, 0: -1.0, 5: 100.0})
    assert process(params, ONES) == [0, 3.5, -INF, -INF, -INF, -INF]


@pytest.mark.parametrize("vocab_size", [2, 97, MAX_BIASES, MAX_BIASES + 1, 5000])
def test_a_bias_of_any_number_of_ids_reaches_each_of_them_once(vocab_size: int) -> None:
    generator = np.random.default_rng(0)
    for num in (1, 2, min(vocab_size, MAX_BIASES)):
        ids = generator.permutation(vocab_size)[:num]
        bias = dict(zip(ids.tolist(), generator.uniform(-100, 100, num).tolist(), strict=True))
        table = SamplingTable(1, vocab_size, torch.device("cpu"))
        table.admit(0, SamplingParams(logit_bias=bias), seed=0, prompt_token_ids=[0])
        table.flush()
        logits = torch.randn(1, vocab_size)
        expected = logits.clone()
        expected[0, ids] += torch.tensor(list(bias.values()))
        got = Sampler(table, reference_ops()).process(logits, torch.tensor([0]))
        assert torch.equal(got, expected)


def test_a_bad_word_is_banned_where_its_last_token_would_complete_it() -> None:
    words = ([3], [1, 2], [0, 1, 4])
    assert process(SamplingParams(), ONES, (0,), (), words) == [1, 1, 1, -INF, 1, 1]
    assert process(SamplingParams(), ONES, (0,), (1,), words) == [1, 1, -INF, -INF, -INF, 1]
    assert process(SamplingParams(), ONES, (0,), (1, 1), words) == [1, 1, -INF, -INF, 1, 1]


def test_stop_ids_are_banned_until_min_tokens_outputs_are_there() -> None:
    params = SamplingParams(min_tokens=2)
    banned = [1, 1, -INF, 1, 1, -INF]
    assert process(params, ONES, (0, 2), (), (), (2, 5)) == banned
    assert process(params, ONES, (0, 2), (1,), (), (2, 5)) == banned
    assert process(params, ONES, (0, 2), (1, 1), (), (2, 5)) == ONES
    assert process(SamplingParams(), ONES, (0, 2), (), (), (2, 5)) == ONES


def test_repetition_counts_prompt_and_output_and_heeds_the_sign() -> None:
    params = SamplingParams(repetition_penalty=2)
    got = process(params, [4.0, -4.0, 4.0, -4.0, 0.0, 4.0], (0, 1), (0, 3, 4))
    assert got == [2, -8, 4, -8, 0, 4]


def test_presence_and_frequency_count_outputs_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert process(params, ONES, (0, 0, 1), (1, 2, 2)) == [1, 0.25, 0, 1, 1, 1]


def test_penalties_come_after_the_bias_and_repetition_before_the_others() -> None:
    params = SamplingParams(logit_bias={1: 3.0}, repetition_penalty=2, presence_penalty=1)
    assert process(params, ONES, (0,), (1,)) == [0.5, 1, 1, 1, 1, 1]


EVERYTHING = SamplingParams(
    allowed_token_ids=list(range(0, 400, 3)),
    logit_bias={3: 7.0, 9: -50.0},
    repetition_penalty=1.7,
    presence_penalty=1,
    frequency_penalty=-0.3,
    min_tokens=5,
    logprobs=2,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [1, 3, 2**22])
def test_rows_that_ask_for_nothing_keep_their_bits_beside_those_that_ask_for_everything(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros of both signs, the smallest numbers, infinities and NaN among them; and what came in
    stays as it was."""
    size = 401
    monkeypatch.setattr(module, "BLOCK_LOGITS", block * size)
    table = SamplingTable(7, size, torch.device("cpu"))
    for row in range(7):
        asked = EVERYTHING if row % 2 else SamplingParams(temperature=0)
        table.admit(
            row,
            asked,
            seed=0,
            prompt_token_ids=[3, 4],
            bad_words_ids=[[6]] * (row % 2),
            stop_ids=[9],
        )
    sampler = Sampler(table, reference_ops())
    order = np.array([5, 7, 0, 1, 2, 7, 4, 3])  # 7: padding
    logits = torch.randn(8, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    tiny = torch.finfo(torch.float32).tiny / 4
    logits[:, 3:10] = torch.tensor([0.0, -0.0, tiny, -tiny, INF, -INF, torch.nan], dtype=dtype)
    before, rows = logits.clone(), torch.from_numpy(order)
    for _ in range(3):
        sampler.prepare(order[:1], np.array([2]), np.zeros((8, 9), int))
        got = sampler.process(logits, rows)
        for at, row in enumerate(order.tolist()):
            plain = row == 7 or row % 2 == 0
            assert (bits(got[at]) == bits(before[at].to(got.dtype))).all() == plain
        assert (bits(logits) == bits(before)).all()
        table.penalties.observe(rows, torch.full((8,), 3, dtype=torch.int32))


def bits(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def greedy_run(
    table: SamplingTable, row: int, logits: Tensor, history: list[int], steps: int
) -> list[int]:
    token_ids = np.zeros((4, 32), np.int64)
    for _ in range(steps):
        token_ids[row, : len(history)] = history
        out = sample(table, logits.clone(), np.array([row]), np.array([len(history)]), token_ids)
        history = [*history, int(out.token_ids)]
    return history


PENALIZED = SamplingParams(
    temperature=0,
    repetition_penalty=1.3,
    frequency_penalty=0.37,
    presence_penalty=0.2,
    min_tokens=4,
)


@pytest.mark.parametrize("stop", range(7))
def test_a_row_readmitted_with_its_outputs_goes_on_as_if_never_stopped(stop: int) -> None:
    """As after a preemption: another row, where another request had counts before."""
    logits = torch.tensor([[2.0, 1.9, 1.8, 2.6, 1.7, -0.5]])
    prompt = [3, 3, 5]

    def admit(table: SamplingTable, row: int, history: list[int]) -> None:
        table.admit(
            row,
            PENALIZED,
            seed=0,
            prompt_token_ids=prompt,
            output_token_ids=history[3:],
            stop_ids=[2],
        )

    table = SamplingTable(4, V, torch.device("cpu"))
    admit(table, 0, prompt)
    unbroken = greedy_run(table, 0, logits, prompt, 7)
    assert len(set(unbroken[3:])) > 3, "the penalties must matter"

    table = SamplingTable(4, V, torch.device("cpu"))
    for row in range(3):
        table.admit(row, PENALIZED, seed=0, prompt_token_ids=[0, 1], output_token_ids=[4, 4])
    table.release(1)
    admit(table, 1, prompt)
    first = greedy_run(table, 1, logits, prompt, stop)
    table.release(1)
    table.release(2)
    admit(table, 2, first)
    assert greedy_run(table, 2, logits, first, 7 - stop) == unbroken


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("follower", ["nothing", "penalties"])
def test_a_released_row_leaves_nothing_to_the_next(follower: str, is_sent: bool) -> None:
    heavy = SamplingParams(
        logit_bias={0: 9.0}, allowed_token_ids=[0], presence_penalty=2, logprobs=3, seed=4
    )
    light = SamplingParams(
        temperature=0, frequency_penalty=0.25 if follower == "penalties" else 0, seed=0
    )
    rows, positions, history = np.array([1]), np.array([1]), np.zeros((2, 4), int)
    found = []
    for had in (False, True):
        table = SamplingTable(2, V, torch.device("cpu"))
        if had:
            table.admit(1, heavy, seed=4, prompt_token_ids=[0], bad_words_ids=[[1], [1, 5]])
            if is_sent:
                for _ in range(3):
                    sample(table, torch.zeros(1, V), rows, positions, history)
            table.release(1)
            assert not table.masks.reads_history.any()
        table.admit(1, light, seed=0, prompt_token_ids=[0])
        out = [
            sample(table, torch.arange(6.0)[None] / 8, rows, positions, history) for _ in range(5)
        ]
        assert all(each.logprobs is None for each in out)
        found.append([int(each.token_ids) for each in out])
    assert found[0] == found[1]
    assert (len(set(found[0])) > 1) == (follower == "penalties")


def test_the_padding_row_stays_neutral_however_often_it_is_counted() -> None:
    table = SamplingTable(2, V, torch.device("cpu"))
    table.admit(0, PENALIZED, seed=0, prompt_token_ids=[0])
    sampler = Sampler(table, reference_ops())
    logits = torch.randn(5, V)
    rows, positions = torch.tensor([0, 2, 2, 2, 2]), torch.zeros(5, dtype=torch.int64)
    sampler.prepare(np.array([0]), np.array([1]), np.zeros((2, 4), int))
    for _ in range(4):
        sampler.draw_processed(logits, rows, positions)
    assert torch.equal(sampler.process(logits, rows)[1:], logits[1:])
    assert not torch.equal(sampler.process(logits, rows)[0], logits[0])


def test_an_upload_that_fails_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks ends its own requests alone: who gets a row next inherits nothing."""
    table = SamplingTable(2, 40, torch.device("cpu"))
    sampler, history = Sampler(table, reference_ops()), np.zeros((3, 9), int)
    table.admit(0, SamplingParams(logit_bias={7: 100.0}), seed=0, prompt_token_ids=[0])
    sampler.prepare(np.array([0]), np.array([1]), history)
    table.release(0)
    table.admit(1, SamplingParams(presence_penalty=1), seed=0, prompt_token_ids=[0])

    def broken(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(processor, "upload", broken)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            sampler.prepare(np.array([1]), np.array([1]), history)
    table.admit(0, SamplingParams(), seed=0, prompt_token_ids=[0])
    sampler.prepare(np.arange(2), np.ones(2, int), history)
    logits = torch.zeros(2, 40)
    assert torch.equal(sampler.process(logits, torch.arange(2))[0], logits[0])


def test_a_mask_that_bans_nothing_any_more_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = SamplingTable(2, 1000, torch.device("cpu"))
    sampler, history = Sampler(table, reference_ops()), np.zeros((3, 9), int)
    params = SamplingParams(min_tokens=1)
    table.admit(0, params, seed=0, prompt_token_ids=[0], stop_ids=[4])
    for position in (1, 2):
        sampler.prepare(np.array([0]), np.array([position]), history)
    assert sampler.is_plain(np.array([0]))
    compared = []
    monkeypatch.setattr(processor.np, "array_equal", lambda *given: compared.append(given))
    sampler.prepare(np.array([0]), np.array([3]), history)
    assert not compared
