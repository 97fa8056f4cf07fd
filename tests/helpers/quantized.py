"""Tiny checkpoints of every scheme, each beside a copy with the same numbers as plain weights."""

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from tests.helpers.checkpoints import edit_config, edit_tensors
from tests.helpers.packings import awq_tensors, compressed_tensors, gptq_tensors, random_grouped
from torch import Tensor

from rackmount_quant.rounding import round_blocks, round_e4m3, round_int8

PROJECTION = re.compile(r"_proj\.weight$")
Packed = tuple[dict[str, Tensor], Tensor]
"""A weight's tensors, and the same as plain numbers."""


def seed_of(name: str) -> int:
    return sum((at + 1) * ord(c) for at, c in enumerate(name))


def columns_of(name: str, size: int, group: int) -> Tensor:
    """Groups of columns out of order, alike for projections of one input."""
    owner, _, last = name.rpartition(".")
    kind = last if last in ("o_proj", "down_proj") else "in"
    random = torch.Generator().manual_seed(seed_of(owner + kind))
    return (torch.arange(size) // group)[torch.randperm(size, generator=random)]


def grouped(name: str, weight: Tensor, **how: Any) -> Any:
    ordered = how.pop("act_order", False)
    groups = columns_of(name, weight.shape[1], how["group"]) if ordered else None
    return random_grouped(*weight.shape, seed=seed_of(name), groups=groups, scale=0.04, **how)


def awq(name: str, weight: Tensor, **how: Any) -> Packed:
    each = grouped(name, weight, **how)
    return awq_tensors(each), each.dense


def gptq(name: str, weight: Tensor, v2: bool = False, **how: Any) -> Packed:
    each = grouped(name, weight, **how)
    return gptq_tensors(each, v2=v2), each.dense


def packed(name: str, weight: Tensor, stored_in: str = "words", **how: Any) -> Packed:
    each = grouped(name, weight, **how)
    tensors = compressed_tensors(
        each,
        packed=stored_in == "words",
        symmetric=how.get("symmetric", False),
        act_order=how.get("act_order", False),
    )
    return tensors, each.dense


def eight_bits(name: str, weight: Tensor, how: str = "tensor", **names: Any) -> Packed:
    """FP8 or INT8, each weight rounded with scales of its own."""
    scale = names.get("scale", "weight_scale")
    if how == "block":
        values, scales = round_blocks(weight, 128)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        tensors = {"weight": values, scale: scales}
        return tensors, values.float() * spread[: weight.shape[0], : weight.shape[1]]
    rounding = round_int8 if names.get("integers") else round_e4m3
    values, scales = rounding(weight, how)  # type: ignore[arg-type]
    tensors = {"weight": values, scale: scales}
    if names.get("static"):
        tensors["input_scale"] = torch.tensor(0.5 + 0.01 * (seed_of(name) % 7))
    return tensors, values.float() * scales.unsqueeze(-1)


def ct(weights: dict[str, Any], form: str, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ignore}
    return config | {"config_groups": {"group_0": group}} | more


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
W4 = {"num_bits": 4, "strategy": "group", "group_size": 16}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor"}
BLOCK = {"weight_block_size": [128, 128]}

SCHEMES: dict[str, tuple[dict[str, Any], Callable[..., Packed], dict[str, Any]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, awq, {"group": 16}),
    "awq by channel": (
        {"quant_method": "awq", "bits": 4, "group_size": -1},
        awq,
        {"group": -1},
    ),
    "gptq": (GPTQ, gptq, {"group": 16}),
    "gptq v2 of 8 bits": (
        GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"},
        gptq,
        {"group": 16, "bits": 8, "v2": True},
    ),
    "gptq by channel": (GPTQ | {"group_size": -1}, gptq, {"group": -1}),
    "gptq with act-order": (
        GPTQ | {"desc_act": True, "group_size": 32},
        gptq,
        {"group": 32, "act_order": True},
    ),
    "gptq of 8 bits with act-order": (
        GPTQ | {"bits": 8, "desc_act": True, "sym": True},
        gptq,
        {"group": 16, "bits": 8, "act_order": True, "symmetric": True},
    ),
    "gptq by channel with act-order": (
        GPTQ | {"desc_act": True, "group_size": -1},
        gptq,
        {"group": -1},
    ),
    "packed": (ct(W4, "pack-quantized"), packed, {"group": 16, "symmetric": True}),
    "packed, asymmetric": (
        ct(W4 | {"symmetric": False}, "pack-quantized"),
        packed,
        {"group": 16},
    ),
    "packed by channel, asymmetric": (
        ct({"num_bits": 4, "strategy": "channel", "symmetric": False}, "pack-quantized"),
        packed,
        {"group": -1},
    ),
    "packed with act-order": (
        ct(W4 | {"actorder": "group", "group_size": 32}, "pack-quantized"),
        packed,
        {"group": 32, "act_order": True, "symmetric": True},
    ),
    "bytes by group, asymmetric": (
        ct(W4 | {"num_bits": 8, "symmetric": False}, "int-quantized"),
        packed,
        {"group": 16, "bits": 8, "stored_in": "bytes"},
    ),
    "int8 by channel": (
        ct({"num_bits": 8, "strategy": "channel"}, "int-quantized"),
        eight_bits,
        {"how": "channel", "integers": True},
    ),
    "int8 by tensor": (
        ct({"num_bits": 8, "strategy": "tensor"}, "int-quantized"),
        eight_bits,
        {"how": "tensor", "integers": True},
    ),
    "fp8 by tensor, static": (
        ct(STATIC, "float-quantized", STATIC),
        eight_bits,
        {"how": "tensor", "static": True},
    ),
    "fp8 by channel": (
        ct(STATIC | {"strategy": "channel"}, "float-quantized"),
        eight_bits,
        {"how": "channel"},
    ),
    "autofp8, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        eight_bits,
        {"static": True},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        eight_bits,
        {"static": True},
    ),
    "fp8 by block": (
        {"quant_method": "fp8", **BLOCK},
        eight_bits,
        {"how": "block", "scale": "weight_scale_inv"},
    ),
}
"""Case -> `quantization_config`, how a weight is packed, and with what."""


def quantized(folder: Path, case: str) -> tuple[Path, Path]:
    """Two copies of a checkpoint: quantized, and with the same numbers as plain weights."""
    config, pack, how = SCHEMES[case]
    stored, plain = folder.with_name("stored"), folder.with_name("plain")

    def replace(tensors: dict[str, Tensor], as_plain: bool) -> None:
        for name in [name for name in tensors if PROJECTION.search(name)]:
            parts, dense = pack(name.removesuffix(".weight"), tensors.pop(name), **how)
            if as_plain:
                tensors[name] = dense
                continue
            for suffix, tensor in parts.items():
                tensors[name.removesuffix("weight") + suffix] = tensor

    for copy, as_plain in ((stored, False), (plain, True)):
        edit_tensors(copytree(folder, copy), lambda t, as_plain=as_plain: replace(t, as_plain))
    edit_config(stored, lambda values: values.update(quantization_config=config))
    return stored, plain
