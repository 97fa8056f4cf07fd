"""Tensor names and row orders: what llama.cpp writes, as Hugging Face has it."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<leaf>weight|bias)")


def hugging_face_name(name: str) -> str | None:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; None if unknown."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    layer, part, leaf = match["layer"], match["part"], match["leaf"]
    module = _MODEL.get(part) if layer is None else _LAYER.get(part)
    if module is None:
        return None
    return f"{module}.{leaf}" if layer is None else f"model.layers.{layer}.{module}.{leaf}"


def num_paired_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """The number of heads of a tensor whose rows the file keeps in rotary pairs; None for others.

    `config` is config.json, `name` a name of Hugging Face.
    """
    if config["model_type"] != "llama":
        return None
    if ".self_attn.q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".self_attn.k_proj." in name else None


def rope_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Where a `llama` file keeps each row of a Hugging Face q or k projection: int64 [num_rows].

    Rotary embedding turns pairs of a head's rows. Hugging Face pairs row i with row
    i + head_dim / 2; llama.cpp's converter stores the two side by side, as rows 2 i and 2 i + 1.
    """
    pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(num_rows)
