"""The scheme modelopt: its FP8 algorithms in both spellings of the configuration."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.schemes import load, read_scheme

from rackmount.loading.safetensors_reader import read_configuration
from rackmount_quant.modelopt import ModelOptScheme
from rackmount_quant.rounding import round_blocks, round_e4m3
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import KVCacheScheme, StoredFormat

UP = "model.layers.0.mlp.up_proj"
PRODUCER = {"name": "modelopt", "version": "0.33.0"}
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}


def scheme(nested: bool = False, **settings: Any) -> ModelOptScheme:
    outer = {"quant_method": "modelopt", "producer": PRODUCER}
    values = outer | ({"quantization": settings} if nested else settings)
    return read_scheme(ModelOptScheme, values)


def stored_as(algorithm: str) -> StoredFormat:
    stored = scheme(quant_algo=algorithm).format_for(UP, (8, 8), "linear")
    assert stored is not None
    return stored


def test_fp8_has_a_scale_a_tensor_and_a_static_one_for_inputs() -> None:
    values, scales = round_e4m3(torch.randn(6, 8), "tensor")
    packed = {"weight": values, "weight_scale": scales.squeeze(), "input_scale": torch.tensor(0.5)}
    finished = load(stored_as("FP8"), [packed], (6,), 8)
    assert (finished.format, finished.activation) == ("fp8_rows", "tensor")
    assert torch.equal(finished.dequantize(), values.float() * scales)
    assert finished.tensors["input_scale"].tolist() == [0.5]


def test_channels_have_scales_and_inputs_are_rounded_by_token() -> None:
    values, scales = round_e4m3(torch.randn(6, 8), "channel")
    packed = {"weight": values, "weight_scale": scales}
    finished = load(stored_as("FP8_PER_CHANNEL_PER_TOKEN"), [packed], (6,), 8)
    assert (finished.format, finished.activation) == ("fp8_rows", "token")
    assert torch.equal(finished.dequantize(), values.float() * scales.unsqueeze(1))


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
def test_blocks_have_scales_in_four_dimensions_and_inputs_stay(algorithm: str) -> None:
    values, scales = round_blocks(torch.randn(200, 130), 128)
    packed = {"weight": values, "weight_scale": scales[:, None, :, None]}
    finished = load(stored_as(algorithm), [packed], (200,), 130)
    assert (finished.format, finished.activation) == ("fp8_blocks", "plain")
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
    assert torch.equal(finished.dequantize(), values.float() * spread)


@pytest.mark.parametrize("nested", [True, False])
def test_what_is_excluded_is_plain_in_both_spellings(nested: bool) -> None:
    exclusions = ["lm_head", "model.layers.0*", "*.self_attn.qkv_proj"]
    key = "exclude_modules" if nested else "ignore"
    chosen = scheme(nested, quant_algo="FP8", **{key: exclusions})
    assert chosen.format_for(UP, (8, 8), "linear") is None
    assert chosen.format_for("model.layers.1.self_attn.k_proj", (8, 8), "linear") is None
    assert chosen.format_for("model.layers.1.mlp.up_proj", (8, 8), "linear") is not None
    assert chosen.format_for("model.layers.1.mlp.gate", (8, 8), "router") is None
    assert chosen.format_for("lm_head", (8, 8), "head") is None


@pytest.mark.parametrize(
    ("nested", "settings", "expected"),
    [
        (True, {"kv_cache_quant_algo": "FP8"}, KVCacheScheme()),
        (True, {"kv_cache_quant_algo": None}, None),
        (False, {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
        (False, {}, None),
    ],
)
def test_the_kv_cache_is_as_the_checkpoint_wants_it(
    nested: bool, settings: dict[str, Any], expected: Any
) -> None:
    kv_cache = scheme(nested, quant_algo="FP8", **settings).kv_cache
    assert kv_cache == (KVCacheScheme() if expected else None)


def read_beside(folder: Path, stored: dict[str, Any]) -> Any:
    """A quantization_config with what a file beside it adds: FP8 keys and values."""
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    for name, content in (
        ("config.json", {"quantization_config": stored}),
        ("hf_quant_config.json", {"producer": PRODUCER, "quantization": own}),
    ):
        (folder / name).write_text(json.dumps(content))
    return read_configuration(folder / "config.json")["quantization_config"]


def test_what_a_file_of_its_own_adds_is_read_beside_the_rest(tmp_path: Path) -> None:
    """Both spellings at once, as `read_configuration` lays one below the other."""
    flat = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    stored = read_beside(tmp_path, flat)
    assert read_scheme(ModelOptScheme, stored).kv_cache == KVCacheScheme()
    assert read_scheme(ModelOptScheme, flat).kv_cache is None


def test_what_versions_31_to_33_wrote_is_read(tmp_path: Path) -> None:
    """Without a method, targets of the group, or more of the cache than its format."""
    stored = {
        "config_groups": {"group_0": {"input_activations": EIGHT, "weights": EIGHT}},
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "kv_cache_scheme": "FP8",
        "producer": PRODUCER,
        "quant_library": "modelopt",
    }
    section = read_beside(tmp_path, stored)
    found = read_scheme(ModelOptScheme, section)
    assert section["quant_method"] == "modelopt" and found.kv_cache == KVCacheScheme()
    assert found.format_for(UP, (8, 8), "linear") == stored_as("FP8")


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_algo": "NVFP4"}, "quant_algo='NVFP4' must be one of FP8, FP8_PER_CHANNEL"),
        ({"quant_algo": "W4A16_NVFP4"}, "quant_algo='W4A16_NVFP4' must be one of"),
        ({"quant_algo": "MXFP8"}, "quant_algo='MXFP8' must be one of"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo='MIXED_PRECISION' must be one of"),
        ({}, "quant_algo=None must be one of"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
        ({"quant_algo": "FP8", "quantized_layers": {"a": 1}}, "quantized_layers"),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "must be a list of names"),
    ],
)
def test_what_is_not_read_is_refused(nested: bool, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(nested, **settings)


def groups(weights: Any = EIGHT, inputs: Any = EIGHT, **changes: Any) -> dict[str, Any]:
    """`config_groups` as ModelOpt writes it beside FP8; the other algorithms have none."""
    both = {"input_activations": inputs, "weights": weights}
    return {"group_0": both | {"targets": ["Linear"]} | changes}


@pytest.mark.parametrize(
    ("algorithm", "weights", "inputs"),
    [
        ("FP8", EIGHT, EIGHT),
        ("FP8_PER_CHANNEL_PER_TOKEN", EIGHT | {"strategy": "channel"}, EIGHT | {"dynamic": True}),
        ("fp8_pb_wo", EIGHT | {"strategy": "block", "block_structure": [128, 128]}, None),
    ],
)
@pytest.mark.parametrize("size", [None, 0])
def test_groups_may_say_again_what_the_algorithm_says(
    algorithm: str, weights: Any, inputs: Any, size: Any
) -> None:
    given = groups(weights, inputs)
    found = scheme(quant_algo=algorithm, config_groups=given, group_size=size)
    assert found.format_for(UP, (8, 8), "linear") == stored_as(algorithm)
    scheme(quant_algo=algorithm, config_groups=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 16}, "group_size=16 must be None or 0"),
        ({"config_groups": [groups()]}, "must be an object"),
        ({"config_groups": {"group_0": 8}}, "config_groups: group_0=8 must be an object"),
        ({"config_groups": {"group_0": {}}}, "config_groups: group_0={} must have weights"),
        ({"config_groups": groups(EIGHT | {"num_bits": 4})}, "weights: num_bits=4 must be 8"),
        ({"config_groups": groups(EIGHT | {"type": "int"})}, "weights: type='int' must be 'float'"),
        ({"config_groups": groups(EIGHT | {"group_size": 16})}, "weights: group_size=16 must be"),
        (
            {"config_groups": groups(inputs=EIGHT | {"group_size": 16})},
            "input_activations: strategy=None must be 'tensor'",
        ),
        (
            {"config_groups": groups(EIGHT | {"strategy": "channel"})},
            "is fp8 by channel, inputs tensor, and quant_algo fp8 by tensor, inputs tensor",
        ),
        ({"config_groups": groups(inputs=None)}, "is fp8 by tensor, inputs plain, and quant_algo"),
        (
            {"config_groups": groups(inputs=EIGHT | {"dynamic": True})},
            "is fp8 by tensor, inputs token, and quant_algo fp8 by tensor, inputs tensor",
        ),
        ({"config_groups": groups(targets=["lm_head"])}, "targets=['lm_head'] must be ['Linear']"),
        ({"config_groups": groups(pre_quant_scale=True)}, "does not read pre_quant_scale"),
    ],
)
def test_groups_that_say_otherwise_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(quant_algo="FP8", **changes)
