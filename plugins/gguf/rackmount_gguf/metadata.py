"""GGUF metadata as Hugging Face's config.json and generation_config.json."""

from typing import Any

import numpy as np

from rackmount_gguf.container import STORED_TYPES, Container
from rackmount_registry.errors import CheckpointError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` -> config.json's `architectures`."""

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is configuration: what the rotary frequencies are divided by, [head_dim / 2]."""


class _Section:
    """The metadata of one architecture; remembers what was read, so that nothing is overlooked."""

    def __init__(self, container: Container, architecture: str) -> None:
        prefix = architecture + "."
        self._where = f"{container.path}: metadata {prefix}"
        self._values = {
            key.removeprefix(prefix): value
            for key, value in container.metadata.items()
            if key.startswith(prefix)
        }
        self._unread = {key for key, value in self._values.items() if value}  # 0 switches off

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(key)
        value = self._values.get(key, default)
        if isinstance(value, list):
            raise CheckpointError(f"{self._where}{key} differs by layer; one value for all is read")
        if isinstance(value, float):
            return float(str(np.float32(value)))  # the file's 9.9999997e-06 was meant as 1e-05
        return value

    def need(self, key: str, default: int | None = None) -> Any:
        """A size or another number above zero."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self._where}{key} is missing")
        if not isinstance(value, int | float) or value <= 0:
            raise self.refuse(key, value, "must be a number above zero")
        return value

    def refuse(self, key: str, value: Any, rule: str) -> CheckpointError:
        return CheckpointError(f"{self._where}{key}={value!r}: {rule}")

    def close(self) -> None:
        if self._unread:
            raise CheckpointError(
                f"{self._where}* has keys that are not understood and may change what the model "
                f"computes: {', '.join(sorted(self._unread))}"
            )


def config_of(container: Container) -> dict[str, Any]:
    """config.json of the model in the file.

    Raises:
        CheckpointError: an architecture that is not in `ARCHITECTURES`, or metadata that is missing
            or not understood.
    """
    architecture = container.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{container.path} has architecture {architecture!r}; "
            f"those that are read: {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in container.tensors:
        raise CheckpointError(f"{container.path} has no tensor 'token_embd.weight'")
    section = _Section(container, architecture)
    section.get("vocab_size")  # the embedding has the last word: it may be padded
    heads = section.need("attention.head_count")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "torch_dtype": _dtype(container),
        "hidden_act": "silu",
        "vocab_size": container.tensors["token_embd.weight"].shape[0],
        "hidden_size": section.need("embedding_length"),
        "intermediate_size": section.need("feed_forward_length"),
        "num_hidden_layers": section.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": section.need("attention.head_count_kv", heads),
        "head_dim": _head_dim(section),
        "rms_norm_eps": section.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": section.need("context_length"),
        "rope_theta": section.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "attention_bias": "blk.0.attn_q.bias" in container.tensors,
    }
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in container.tensors
    scaling = _rope_scaling(section)
    if ROPE_FACTORS in container.tensors:
        if scaling is not None:
            raise CheckpointError(
                f"{container.path}: rope_freqs.weight and rope.scaling.type exclude each other"
            )
        scaling = _llama3_scaling(container, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    section.close()
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = container.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return {key: value for key, value in config.items() if value is not None}


def generation_config_of(container: Container) -> dict[str, Any]:
    """generation_config.json: the tokens that end an answer (of sequence, of turn, of message)."""
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    ends = sorted({container.metadata[key] for key in keys if key in container.metadata})
    return {"eos_token_id": ends} if ends else {}


def _dtype(container: Container) -> str:
    """The dtype in which matrices come out: their own where all share one, else float32."""
    stored = {STORED_TYPES[t.type] for t in container.tensors.values() if len(t.shape) == 2}
    return stored.pop() if stored in ({"bfloat16"}, {"float16"}) else "float32"


def _head_dim(section: _Section) -> int:
    plain = section.need("embedding_length") // section.need("attention.head_count")
    head_dim = section.need("attention.key_length", plain)
    for key in ("attention.value_length", "rope.dimension_count"):
        if section.get(key, head_dim) != head_dim:
            raise section.refuse(key, section.get(key), f"must be the head size, {head_dim}")
    return head_dim


def _rope_scaling(section: _Section) -> dict[str, Any] | None:
    """config.json's `rope_scaling` from the keys `rope.scaling.*`."""
    kind = section.get("rope.scaling.type", "linear")
    factor = section.get("rope.scaling.factor", 0.0)
    length = section.get("rope.scaling.original_context_length")
    section.get("rope.scaling.finetuned")  # says how the weights came about
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise section.refuse("rope.scaling.type", kind, "those that are read: none, linear, yarn")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": section.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": section.get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(container: Container, config: dict[str, Any]) -> dict[str, Any]:
    """The llama3 scaling whose factors the file holds instead of its parameters.

    All Llama 3 models share every parameter but the largest factor, which can be read off; that the
    factors then come out as stored proves it.
    """
    stored = container.tensors[ROPE_FACTORS]
    factors = container.raw(stored).view(np.float32)
    low, high, length, factor = 1.0, 4.0, 8192, float(factors.max())
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** exponents
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{container.path}: the factors in {ROPE_FACTORS!r} are not those of a Llama 3 model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
