"""The engine's distribution at every position, held against `transformers`.

A log-softmax over the whole vocabulary leaves out nothing of the logits but a constant per row.
"""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import VOCAB, fuse_experts, oracle_logits, tiny_checkpoint
from tests.helpers.engines import assert_idle, distributions, greedy, rows, tiny_engine
from transformers import PreTrainedModel

from rackmount import Engine, RequestOutput

TOLERANCE = 1e-4
EVERYTHING = greedy(12, logprobs=VOCAB, prompt_logprobs=VOCAB)
GENERATED = greedy(12, logprobs=VOCAB)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen3 with as many KV heads as heads": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3 with wide heads": ("qwen3", {"head_dim": 24}),
    "mistral with a window": ("mistral", {"sliding_window": 7}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe, a dense layer, renormalized": (
        "qwen3-moe",
        {"mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", {}),
}
CHUNKS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks of 1": {"max_num_batched_tokens": 1},
    "in chunks of 7": {"max_num_batched_tokens": 7},
    "in chunks of 7 side by side": {"long_prefill_token_threshold": 7},
    "in chunks of a block": {"long_prefill_token_threshold": 4},
    "in chunks of 7 in blocks of 16": {
        "long_prefill_token_threshold": 7,
        "block_size": 16,
        "num_kv_blocks": 9,
    },
    "in one block": {"block_size": 64, "num_kv_blocks": 4},
}

Tiny = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Checkpoint and model of a case, made once."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(case: str) -> tuple[Path, PreTrainedModel]:
        if case not in made:
            family, overrides = MODELS[case]
            made[case] = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), family, **overrides)
        return made[case]

    return make


def assert_equals_oracle(
    output: RequestOutput, model: PreTrainedModel, tolerance: float = TOLERANCE
) -> None:
    """Every distribution that `output` lists, at the position of its token."""
    prompt, (answer,) = output.prompt_token_ids, output.outputs
    expected = oracle_logits(model, torch.tensor(prompt + answer.token_ids)).log_softmax(-1)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) > 0
    entries, first = answer.logprobs, len(prompt)
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        entries, first = [*output.prompt_logprobs[1:], *entries], 1
    assert [entry.token_id for entry in entries] == (prompt + answer.token_ids)[first:]
    ours = distributions(entries)
    torch.testing.assert_close(ours, expected[first - 1 : -1], rtol=0, atol=tolerance)


def answered(engine: Engine, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    outputs = engine.generate(prompts, params)
    assert_idle(engine)
    return outputs


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_logits_equal_transformers_however_the_prompt_is_cut(
    family: str, chunks: str, tiny: Tiny
) -> None:
    folder, model = tiny(family)
    engine = tiny_engine(folder, **CHUNKS[chunks])
    for output in answered(engine, rows(40, 5, 23, 1), EVERYTHING):
        assert_equals_oracle(output, model)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-4), ("bfloat16", 0.4), ("float16", 0.05)]
)
def test_other_dtypes_come_as_close_as_they_can(dtype: str, tolerance: float, tiny: Tiny) -> None:
    folder, model = tiny("llama")
    engine = tiny_engine(folder, dtype=dtype, long_prefill_token_threshold=7)
    for output in answered(engine, rows(40, 5), EVERYTHING):
        assert_equals_oracle(output, model, tolerance)


@pytest.mark.parametrize("case", list(MODELS)[2:])
def test_logits_of_other_models_equal_transformers_in_chunks_and_decoding(
    case: str, tiny: Tiny
) -> None:
    folder, model = tiny(case)
    engine = tiny_engine(folder, long_prefill_token_threshold=7)
    for output in answered(engine, rows(40, 5, 23), EVERYTHING):
        assert_equals_oracle(output, model)


@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "mistral with a window", "qwen3-moe", "mixtral"]
)
def test_logits_after_a_prefix_hit_equal_transformers_at_every_position(
    case: str, tiny: Tiny
) -> None:
    folder, model = tiny(case)
    engine = tiny_engine(folder)
    (prompt,) = rows(40)
    assert engine.generate(prompt[:33], GENERATED)[0].num_cached_tokens == 0
    prompts = [prompt[:length] for length in range(33, 41)]
    for output in answered(engine, prompts, GENERATED):
        assert output.num_cached_tokens == 32
        assert_equals_oracle(output, model)


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("params", [EVERYTHING, GENERATED], ids=["with prompts", "generated"])
@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "mistral with a window", "qwen3-moe", "mixtral"]
)
def test_logits_after_a_preemption_equal_transformers(
    case: str, params: Any, caching: bool, tiny: Tiny
) -> None:
    folder, model = tiny(case)
    engine = tiny_engine(folder, num_kv_blocks=14, enable_prefix_caching=caching)
    outputs = answered(engine, rows(16, 15, 14, 13, 12), params)
    assert engine.stats.total_preemptions > 0
    for output in outputs:
        assert_equals_oracle(output, model)


def test_experts_stored_as_one_tensor_give_the_same_logits(tiny: Tiny, tmp_path: Path) -> None:
    folder, model = tiny("mixtral")
    fuse_experts(copytree(folder, tmp_path / "fused"))
    engine = tiny_engine(tmp_path / "fused", long_prefill_token_threshold=7)
    for output in answered(engine, rows(40, 5, 23), EVERYTHING):
        assert_equals_oracle(output, model)


def test_equal_prompts_in_one_batch_read_no_block_before_it_is_computed(tiny: Tiny) -> None:
    folder, model = tiny("llama")
    engine = tiny_engine(folder, max_num_batched_tokens=24)
    (prompt,) = rows(21)
    for output in answered(engine, [prompt] * 4, GENERATED):
        assert_equals_oracle(output, model)


def test_an_aligned_prompt_that_is_wholly_cached_computes_its_last_block_again(tiny: Tiny) -> None:
    folder, model = tiny("llama")
    engine = tiny_engine(folder)
    (prompt,) = rows(16)
    for num_cached in (0, 12):
        (output,) = answered(engine, [prompt], GENERATED)
        assert output.num_cached_tokens == num_cached
        assert_equals_oracle(output, model)
