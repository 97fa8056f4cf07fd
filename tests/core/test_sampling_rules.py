"""Bans, biases and penalties, and the per-row state behind them."""

import numpy as np
import pytest
import torch
from tests.helpers.sampling import sample
from torch import Tensor

from rackmount.sampling.params import SamplingParams
from rackmount.sampling.rules import apply_rules, completions
from rackmount.sampling.table import SamplingTable

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
    processed, rows = torch.tensor([logits]), np.array([1])
    apply_rules(processed, table, rows, np.array([len(prompt) + len(outputs)]), token_ids)
    table.penalties.apply(processed, rows)
    return processed[0].tolist()


ONES = [1.0] * V


def test_only_allowed_ids_remain() -> None:
    got = process(SamplingParams(allowed_token_ids=[4, 1]), ONES)
    assert got == [-INF, 1, -INF, -INF, 1, -INF]


def test_a_bias_is_added_but_lifts_no_ban() -> None:
    params = SamplingParams(allowed_token_ids=[0, 1], logit_bias={1: 2.5, 0: -1.0, 5: 100.0})
    assert process(params, ONES) == [0, 3.5, -INF, -INF, -INF, -INF]


def test_a_bad_word_is_banned_where_its_last_token_would_complete_it() -> None:
    words = ([3], [1, 2], [0, 1, 4])
    assert process(SamplingParams(), ONES, (0,), (), words) == [1, 1, 1, -INF, 1, 1]
    assert process(SamplingParams(), ONES, (0,), (1,), words) == [1, 1, -INF, -INF, -INF, 1]
    assert process(SamplingParams(), ONES, (0,), (1, 1), words) == [1, 1, -INF, -INF, 1, 1]


def test_a_word_longer_than_the_history_is_not_completed() -> None:
    assert completions([[1, 2, 3], [2, 3], [5]], np.array([2])) == [3, 5]
    assert completions([[1, 2], [5]], np.array([], int)) == [5]
    assert completions([], np.array([1])) == []


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
    """As after a preemption: another row, and other requests' counts in the slots before."""
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


def test_a_released_row_leaves_nothing_to_the_next() -> None:
    table = SamplingTable(2, V, torch.device("cpu"))
    heavy = SamplingParams(
        logit_bias={0: 9.0}, allowed_token_ids=[0], presence_penalty=2, logprobs=3, seed=4
    )
    table.admit(1, heavy, seed=4, prompt_token_ids=[0], bad_words_ids=[[1]])
    table.release(1)
    assert not table.rules
    table.admit(1, SamplingParams(temperature=0), seed=0, prompt_token_ids=[0])
    rows, positions = np.array([1]), np.array([1])
    out = sample(table, torch.arange(6.0)[None], rows, positions, np.zeros((2, 4), int))
    assert (out.token_ids.tolist(), out.logprobs) == ([5], None)


def test_rows_without_penalties_take_no_memory_for_counts() -> None:
    table = SamplingTable(64, 1000, torch.device("cpu"))
    for row in range(64):
        table.admit(row, SamplingParams(), seed=row, prompt_token_ids=[0])
    assert len(table.penalties._num_output) == 0
    for row in range(5):
        table.admit(row, PENALIZED, seed=row, prompt_token_ids=[0])
    assert len(table.penalties._num_output) == 8
    for row in range(5):
        table.admit(row + 5, PENALIZED, seed=row, prompt_token_ids=[0])
        table.release(row)
    assert len(table.penalties._num_output) == 8
