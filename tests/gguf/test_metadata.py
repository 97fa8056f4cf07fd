import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rackmount_gguf.reader import open_checkpoint
from rackmount_registry.errors import CheckpointError

GgufFile = Callable[..., Path]


def config(path: Path) -> dict[str, Any]:
    return dict(open_checkpoint(path).config)


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_a_llama_file_gives_the_config_of_llama(gguf_file: GgufFile) -> None:
    path = gguf_file(
        metadata={
            "llama.rope.freq_base": 500000.0,
            "llama.rope.dimension_count": 16,
            "llama.vocab_size": 8,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 3,
        }
    )
    assert config(path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


def test_a_qwen3_file_gives_the_config_of_qwen3(gguf_file: GgufFile) -> None:
    path = gguf_file(
        {"output.weight": np.zeros((8, 64), np.float32)},
        {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32},
        architecture="qwen3",
    )
    given = config(path)
    assert given["architectures"] == ["Qwen3ForCausalLM"]
    assert given["head_dim"] == 32
    assert given["tie_word_embeddings"] is False
    assert "mlp_bias" not in given


def test_without_its_own_number_there_are_as_many_kv_heads_as_heads(gguf_file: GgufFile) -> None:
    path = gguf_file(metadata={"llama.attention.head_count_kv": None})
    assert config(path)["num_key_value_heads"] == 4


def test_biases_are_seen_in_the_tensors(gguf_file: GgufFile) -> None:
    path = gguf_file(
        {
            "blk.0.attn_q.bias": np.zeros(64, np.float32),
            "blk.0.ffn_up.bias": np.zeros(96, np.float32),
        }
    )
    assert config(path)["attention_bias"] is True
    assert config(path)["mlp_bias"] is True


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "float16"), (np.float32, "float32")])
def test_the_dtype_is_that_of_the_matrices(gguf_file: GgufFile, dtype: type, name: str) -> None:
    path = gguf_file(
        {
            "token_embd.weight": np.zeros((8, 64), dtype),
            "output_norm.weight": np.ones(64, np.float32),
        }
    )
    assert config(path)["torch_dtype"] == name


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"factor": 1.0}, None),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_rope_scaling_is_spelled_as_in_config_json(
    gguf_file: GgufFile, keys: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    path = gguf_file(metadata={f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert config(path).get("rope_scaling") == scaling


def test_an_unknown_rope_scaling_is_refused(gguf_file: GgufFile) -> None:
    path = gguf_file(metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(CheckpointError, match=r"scaling\.type='longrope'.*none, linear, yarn"):
        open_checkpoint(path)


def test_llama3_scaling_is_found_in_its_factors(gguf_file: GgufFile) -> None:
    rope = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64}
    path = gguf_file({"rope_freqs.weight": llama3_factors(500000.0, 64, 32.0)}, rope)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_other_rope_factors_are_refused(gguf_file: GgufFile) -> None:
    factors = llama3_factors(500000.0, 16, 8.0)
    rope = {"llama.rope.freq_base": 500000.0}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight' are not those of a Llama 3"):
        open_checkpoint(gguf_file({"rope_freqs.weight": factors * np.float32(1.1)}, rope))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight' are not those of a Llama 3"):
        open_checkpoint(gguf_file({"rope_freqs.weight": factors[:4]}, rope))
    with pytest.raises(CheckpointError, match="exclude each other"):
        both = {**rope, "llama.rope.scaling.factor": 2.0}
        open_checkpoint(gguf_file({"rope_freqs.weight": factors}, both))


def test_an_unknown_architecture_is_refused_with_the_list(gguf_file: GgufFile) -> None:
    path = gguf_file(architecture="gemma3")
    with pytest.raises(CheckpointError, match=r"architecture 'gemma3'; those.*llama, qwen3"):
        open_checkpoint(path)


@pytest.mark.parametrize("key", ["expert_count", "attention.sliding_window", "rope.scaling.x"])
def test_metadata_that_is_not_understood_is_refused_unless_zero(
    gguf_file: GgufFile, key: str
) -> None:
    open_checkpoint(gguf_file(metadata={f"llama.{key}": 0}))
    path = gguf_file(metadata={f"llama.{key}": 8})
    with pytest.raises(CheckpointError, match=rf"not understood.*{key}"):
        open_checkpoint(path)


def test_a_missing_key_is_named(gguf_file: GgufFile) -> None:
    path = gguf_file(metadata={"llama.block_count": None})
    with pytest.raises(
        CheckpointError, match=r"tiny\.gguf: metadata llama\.block_count is missing"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [0, "four"])
def test_a_size_that_is_no_number_above_zero_is_named(gguf_file: GgufFile, value: Any) -> None:
    path = gguf_file(metadata={"llama.attention.head_count_kv": value})
    with pytest.raises(CheckpointError, match=rf"head_count_kv={value!r}: must be a number above"):
        open_checkpoint(path)


def test_a_missing_embedding_is_named(gguf_file: GgufFile) -> None:
    path = gguf_file({"token_embd.weight": None, "output_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"no tensor 'token_embd\.weight'"):
        open_checkpoint(path)


def test_a_value_for_each_layer_is_refused(gguf_file: GgufFile) -> None:
    path = gguf_file(metadata={"llama.attention.head_count_kv": [2, 4]})
    with pytest.raises(CheckpointError, match="head_count_kv differs by layer"):
        open_checkpoint(path)


def test_partial_rotary_is_refused(gguf_file: GgufFile) -> None:
    path = gguf_file(metadata={"llama.rope.dimension_count": 8})
    with pytest.raises(CheckpointError, match="dimension_count=8: must be the head size, 16"):
        open_checkpoint(path)


def test_every_token_that_ends_an_answer_is_in_the_generation_config(gguf_file: GgufFile) -> None:
    ends = {"eos": 2, "eot": 5, "eom": 2}
    path = gguf_file(metadata={f"tokenizer.ggml.{end}_token_id": i for end, i in ends.items()})
    assert open_checkpoint(path).generation_config == {"eos_token_id": [2, 5]}
    assert open_checkpoint(gguf_file()).generation_config == {}
