"""The engine on a GPU with the reference parts: right in every dtype."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    assert_idle,
    distributions,
    greedy,
    rows,
    tiny_engine,
    tokens_of,
)

from rackmount import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = rows(5, 21, 40)

TOLERANCES = {"float64": 1e-9, "float32": 2e-3, "float16": 0.1, "bfloat16": 0.6}
"""Of log-probabilities with a spread of several units; float32 products may use TF32."""


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_prompt_logprobs_on_the_gpu_equal_those_on_the_cpu(
    tmp_path: Path, family: str, dtype: str
) -> None:
    more = {"sliding_window": 8} if family == "mistral" else {}
    folder, _ = tiny_checkpoint(tmp_path, family, **more)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=97)
    found = {}
    for device, kind in (("cpu", "float64"), ("cuda", dtype)):
        with tiny_engine(folder, device=device, dtype=kind, max_num_batched_tokens=16) as engine:
            outputs = engine.generate(PROMPTS, params)
            found[device] = [distributions(each.prompt_logprobs[1:]) for each in outputs]
            assert_idle(engine)
    errors = torch.cat(
        [
            (ours - expected).abs().amax(-1)
            for ours, expected in zip(found["cuda"], found["cpu"], strict=True)
        ]
    )
    # Half precision may choose other experts that are nearly as good: in more than half the rows it
    # does not.
    several = family in ("mixtral", "qwen3-moe") and dtype in ("float16", "bfloat16")
    assert (errors.median() if several else errors.max()) < TOLERANCES[dtype]


def test_greedy_text_on_the_gpu_is_that_of_the_cpu_under_preemption(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3")
    tokens = {}
    for device, blocks in (("cpu", 64), ("cuda", 20)):
        with tiny_engine(folder, device=device, dtype="float64", num_kv_blocks=blocks) as engine:
            outputs = engine.generate(rows(24, 24, 24), greedy(20))
            tokens[device] = [each.token_ids for each in outputs]
            preemptions = engine.stats.total_preemptions
    assert preemptions > 0
    assert tokens["cuda"] == tokens["cpu"]


def test_sampled_text_on_the_gpu_is_that_of_the_cpu(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=20)
    tokens = {}
    for device in ("cpu", "cuda"):
        with tiny_engine(folder, device=device, dtype="float64") as engine:
            tokens[device] = [each.token_ids for each in engine.generate(PROMPTS, params)]
    assert tokens["cuda"] == tokens["cpu"]


def test_threads_and_engines_beside_it_change_nothing(tmp_path: Path) -> None:
    """A new thread's GPU is the first one, and an engine that is made changes its maker's: of
    several GPUs the first engine has the last."""
    folder, _ = tiny_checkpoint(tmp_path, "llama", head_dim=64, hidden_size=128)
    given = {"dtype": "float32", "block_size": None}
    last = f"cuda:{torch.cuda.device_count() - 1}"
    with tiny_engine(folder, device=last, **given) as engine:
        alone = tokens_of(engine, PROMPTS, greedy(20))
        with tiny_engine(folder, device="cuda:0", **given) as other, ThreadPoolExecutor(3) as pool:
            shared = [engine, other, engine]
            found = list(pool.map(lambda each: tokens_of(each, PROMPTS, greedy(20)), shared))
            assert found == [alone] * 3
            assert tokens_of(engine, PROMPTS, greedy(20)) == alone
