"""Ranks on GPUs: a process for one, and NCCL between several."""

from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import assert_idle, distributions, greedy, rows, tiny_engine, tokens_of

pytestmark = pytest.mark.gpu

TOLERANCES = {"float64": 1e-9, "bfloat16": 0.6}
"""Of log-probabilities with a spread of several units."""


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_on_gpus_equal_one_in_this_process(
    tmp_path: Path, tp: int, dtype: str, family: str
) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"{tp} GPUs are needed")
    folder, _ = tiny_checkpoint(tmp_path, family, num_attention_heads=8)
    params = greedy(6, prompt_logprobs=97)
    outputs, texts = [], []
    for executor, ranks in (("in-process", 1), ("multiprocess", tp)):
        arguments = {"executor": executor, "tp": ranks, "device": "cuda", "dtype": dtype}
        with tiny_engine(folder, max_num_batched_tokens=16, **arguments) as engine:
            outputs.append(engine.generate(rows(5, 21, 40), params))
            # Chunks that end no prompt leave no row behind the last attention.
            texts.append(tokens_of(engine, rows(40, 33), greedy(6)))
            assert_idle(engine)
    assert dtype == "bfloat16" or texts[0] == texts[1]
    for one, many in zip(*outputs, strict=True):
        difference = distributions(many.prompt_logprobs[1:]) - distributions(
            one.prompt_logprobs[1:]
        )
        assert difference.abs().max() < TOLERANCES[dtype]
        assert dtype == "bfloat16" or many.token_ids == one.token_ids
