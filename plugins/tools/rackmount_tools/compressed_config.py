"""`quantization_config` as compressed-tensors spells it, of what `rackmount calibrate` writes."""

from collections.abc import Mapping, Sequence
from typing import Any

METHOD = "compressed-tensors"
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INTEGERS = {"type": "int", "symmetric": True, "dynamic": False}
ROUNDINGS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {
        "format": "float-quantized",
        "weights": FLOATS | {"strategy": "channel"},
        "inputs": {"strategy": "token"},
    },
    "fp8-tensor": {
        "format": "float-quantized",
        "weights": FLOATS | {"strategy": "tensor"},
        "inputs": {"strategy": "token"},
    },
    "fp8-block": {
        "format": "float-quantized",
        "weights": FLOATS | {"strategy": "block", "block_structure": [128, 128]},
        "inputs": {"strategy": "group", "group_size": 128},
    },
    "int8": {
        "format": "int-quantized",
        "weights": INTEGERS | {"num_bits": 8, "strategy": "channel"},
        "inputs": {"strategy": "token"},
    },
    "int4": {
        "format": "pack-quantized",
        "weights": INTEGERS | {"num_bits": 4, "strategy": "group"},
    },
    "int4-asym": {
        "format": "pack-quantized",
        "weights": INTEGERS | {"num_bits": 4, "strategy": "group", "symmetric": False},
    },
}
"""Name -> how weights are stored, and what of the inputs has a scale where they are rounded while
the model runs; without "inputs" they stay as they are."""

STATIC = ("fp8", "fp8-tensor", "int8")
"""Those whose inputs may have one scale that was found beforehand."""

GROUPED = ("int4", "int4-asym")
"""Those with a scale for each group of columns."""

KV_STRATEGIES = {"tensor": "tensor", "head": "attn_head"}
"""What has a scale of its own -> its name there."""


def quantization_config(
    *, weights: str, static: bool, group_size: int, kv_scales: str, ignore: Sequence[str]
) -> dict[str, Any]:
    """The whole section.

    Args:
        weights: one of `ROUNDINGS`, or "none".
        static: inputs have one scale each, found beforehand.
        kv_scales: one of `KV_STRATEGIES`, or "none".
        ignore: weights that stay plain.
    """
    config: dict[str, Any] = {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
    }
    if weights != "none":
        rounding = ROUNDINGS[weights]
        args = dict(rounding["weights"])
        if args["strategy"] == "group":
            args["group_size"] = group_size
        kind = {key: args[key] for key in ("num_bits", "type", "symmetric")}
        inputs: dict[str, Any] | None = None
        if static:
            inputs = kind | {"strategy": "tensor", "dynamic": False}
        elif "inputs" in rounding:
            inputs = kind | rounding["inputs"] | {"dynamic": True}
        group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
        config |= {"format": rounding["format"], "config_groups": {"group_0": group}}
        config["ignore"] = list(ignore)
    if kv_scales != "none":
        config["kv_cache_scheme"] = kv_cache_scheme(kv_scales)
    return config


def key_map_names(index: int) -> tuple[str, str]:
    """Beside the projections of the model's attention layer so and so: the tensors that map its
    queries and its keys, as `transform_config` has them called."""
    return f"queries_{index}_q_attn.weight", f"keys_{index}_k_cache.weight"


def transform_config(attention: Mapping[int, tuple[str, int]]) -> dict[str, Any]:
    """Of maps for the attention modules by their index: their names and head sizes."""

    def group(location: str, name: str, head_size: int) -> dict[str, Any]:
        apply = {"targets": [name], "location": location, "inverse": False, "ignore": []}
        return {"type": "random-matrix", "head_dim": head_size, "apply": [apply]}

    groups = {}
    for index, (name, head_size) in attention.items():
        groups[f"queries_{index}"] = group("q_attn", name, head_size)
        groups[f"keys_{index}"] = group("k_cache", name, head_size)
    return {"config_groups": groups}


def kv_cache_scheme(kv_scales: str) -> dict[str, Any]:
    """Of scales for each layer ("tensor") or each KV head ("head")."""
    return FLOATS | {"strategy": KV_STRATEGIES[kv_scales]}
