"""How many tokens a step takes through the model to its end: those that it samples from, or, where
prompt logprobs are asked for, all."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import assert_idle, greedy, rows, tiny_engine
from torch import Tensor

from rackmount import Engine, RequestOutput
from rackmount.execution.buffers import StepTensors

PROMPTS = rows(12, 2, 9, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")[0]


def answers(engine: Engine, params: Any) -> tuple[list[RequestOutput], list[tuple[int, int]]]:
    """And of each step its tokens, and the hidden states that came of them."""
    runner, steps = engine.core.executor._program._worker._runner, []
    forward = runner.forward

    def counted(tensors: StepTensors) -> Tensor:
        hidden = forward(tensors)
        steps.append((len(tensors.token_ids), len(hidden)))
        return hidden

    runner.forward = counted
    outputs = engine.generate(PROMPTS, params)
    assert_idle(engine)
    return outputs, steps


def test_a_step_ends_with_the_tokens_that_it_samples_from(folder: Path) -> None:
    with tiny_engine(folder, max_num_batched_tokens=16, async_scheduling=False) as engine:
        _, steps = answers(engine, greedy(3))
        # 12 + 2 + 2 of 9; 1 + 1 + 7 of 9 + 5; then each its own.
        assert steps == [(16, 2), (14, 4), (4, 4), (2, 2)]


def test_a_chunk_that_ends_no_prompt_leaves_no_row(folder: Path) -> None:
    with tiny_engine(folder, max_num_batched_tokens=5, async_scheduling=False) as engine:
        _, steps = answers(engine, greedy(1))
        assert steps[:2] == [(5, 0), (5, 0)]


@pytest.mark.parametrize("budget", [5, 16, 64])
def test_prompt_logprobs_take_all_and_change_nobody_s_answer(folder: Path, budget: int) -> None:
    with tiny_engine(folder, max_num_batched_tokens=budget, async_scheduling=False) as engine:
        plain, _ = answers(engine, greedy(6, logprobs=2))
        params = [greedy(6, logprobs=2)] * 2 + [greedy(6, logprobs=2, prompt_logprobs=1)] * 2
        mixed, steps = answers(engine, params)
    assert any(tokens == hidden > len(PROMPTS) for tokens, hidden in steps)
    for one, other in zip(plain, mixed, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
