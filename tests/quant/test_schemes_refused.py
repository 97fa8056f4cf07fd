"""Whole checkpoints of every scheme with something wrong: refused by layer, file and rule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import edit_config, edit_tensors, tiny_checkpoint
from tests.helpers.mounting import mount_reference
from tests.helpers.quantized import SCHEMES, W4, quantized
from tests.helpers.ranks import ThreadGroup
from torch import Tensor

from rackmount_quant.fp8 import Fp8Scheme
from rackmount_registry.axes import Mesh
from rackmount_registry.errors import CheckpointError, ConfigError

LAYER = "model.layers.1.mlp"
BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "half of a layer": (
        "gptq",
        lambda t: t.pop(f"{LAYER}.up_proj.scales"),
        rf"1 tensors .* not in the checkpoint \(model.safetensors\): {LAYER}.up_proj.scales",
    ),
    "g_idx of one part": (
        "gptq",
        lambda t: t.pop(f"{LAYER}.up_proj.g_idx"),
        rf"not in the checkpoint .*{LAYER}.up_proj.g_idx",
    ),
    "a plain weight": (
        "packed",
        lambda t: t.update({f"{LAYER}.up_proj.weight": torch.ones(128, 64)}),
        rf"neither used .* nor ignored .*{LAYER}.up_proj.weight in model.safetensors",
    ),
    "scales of another group size": (
        "packed",
        lambda t: t.update({f"{LAYER}.up_proj.weight_scale": torch.ones(128, 2)}),
        rf"{LAYER}.up_proj.weight_scale in model.safetensors has shape \[128, 2\], .*\[128, 4\]",
    ),
    "scales that are no numbers": (
        "gptq",
        lambda t: t[f"{LAYER}.up_proj.scales"][1].fill_(torch.nan),
        rf"{LAYER}.up_proj .*\(model.safetensors\): .*scales must be finite and above 0.*: nan",
    ),
    "a bias that the model has not": (
        "gptq",
        lambda t: t.update({f"{LAYER}.down_proj.bias": torch.eye(64)[5]}),
        rf"{LAYER}.down_proj \(model.safetensors\): bias must be 0, .* and 1 of 64 values are not",
    ),
    "scales of zero": (
        "autofp8, static",
        lambda t: t[f"{LAYER}.down_proj.weight_scale"].zero_(),
        rf"{LAYER}.down_proj \(model.safetensors\): weight_scale must be finite and above 0.*: 0.0",
    ),
    "groups that do not exist": (
        "gptq with act-order",
        lambda t: t[f"{LAYER}.down_proj.g_idx"][3].fill_(4),
        rf"{LAYER}.down_proj \(model.safetensors\): groups of columns must be from 0 to 3",
    ),
    "parts in different orders": (
        "gptq with act-order",
        lambda t: t.update({f"{LAYER}.up_proj.g_idx": t[f"{LAYER}.up_proj.g_idx"].flip(0)}),
        rf"{LAYER}.gate_proj, {LAYER}.up_proj .*: projections of one input must have their col",
    ),
    "groups of the other rank": (
        "gptq",
        lambda t: t[f"{LAYER}.down_proj.g_idx"].add_(4).remainder_(8),
        rf"{LAYER}.down_proj \(model.safetensors\): g_idx must be the column // 16, .* 0 it is 4",
    ),
    "rows of another weight": (
        "packed",
        lambda t: t[f"{LAYER}.up_proj.weight_shape"][0].fill_(100),
        rf"{LAYER}.gate_proj, {LAYER}.up_proj .*: weight_shape has \[100\] rows",
    ),
    "an embedding that is quantized": (
        "packed",
        lambda t: t.update({"model.embed_tokens.weight_scale": torch.ones(97, 4)}),
        r"neither used .* nor ignored .*model.embed_tokens.weight_scale",
    ),
    "weights of another type": (
        "int8 by channel",
        lambda t: t.update({f"{LAYER}.up_proj.weight": torch.ones(128, 64)}),
        rf"{LAYER}.up_proj.weight in model.safetensors is float32, the model needs int8",
    ),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_wrong_is_refused_by_layer_file_and_rule(
    broken: str, size: int, tmp_path: Path
) -> None:
    case, edit, message = BROKEN[broken]
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", intermediate_size=128)
    stored, _ = quantized(folder, case)
    edit_tensors(stored, edit)
    with pytest.raises(CheckpointError, match=message):
        for member in ThreadGroup(size).members:  # one of them sees it
            mount_reference(stored, mesh=Mesh.tensor_parallel(member))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("awq", {"group_size": 48}, "group_size=48 means groups of 48 columns, and {0} has 64"),
        (
            "packed",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": W4 | {"group_size": 48}}}},
            "config_groups: a: weights: group_size=48 must divide the columns of {0}, which are 64",
        ),
    ],
)
def test_a_shape_that_is_not_stored_is_refused_by_file_and_layer(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    config = SCHEMES[case][0] | changes
    edit_config(folder, lambda values: values.update(quantization_config=config))
    where = r"config\.json: quantization_config: "
    with pytest.raises(
        ConfigError, match=where + message.format("model.layers.0.self_attn.q_proj")
    ):
        mount_reference(folder)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("awq", "_proj.weight.*; others are there instead, and a quantization_config is not in"),
        ("gptq", "; others are there instead, and a quantization_config is not in config.json"),
        ("packed", "; others are there instead, and a quantization_config is not in config.json"),
        ("int8 by channel", "_proj.weight in model.safetensors is int8, the model needs a float"),
        ("autofp8, static", "values without their scale, which no scheme of its configuration"),
    ],
)
def test_quantized_weights_that_the_configuration_does_not_tell_are_refused(
    case: str, message: str, tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", intermediate_size=128)
    stored, _ = quantized(folder, case)
    edit_config(stored, lambda values: values.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=message):
        mount_reference(stored)


def test_groups_that_ranks_would_cut_are_refused_with_the_numbers(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", intermediate_size=96)
    stored, _ = quantized(folder, "gptq")
    mesh = Mesh.tensor_parallel(ThreadGroup(4).members[1])
    with pytest.raises(ConfigError, match=r"down_proj: 4 ranks cut its in dimension of 96 at 24"):
        mount_reference(stored, mesh=mesh)


def test_plain_weights_that_are_not_finite_are_not_rounded(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj"
    edit_tensors(folder, lambda tensors: tensors[f"{name}.weight"][1, 2].fill_(torch.inf))
    with pytest.raises(CheckpointError, match=rf"{name} .*scales that weight gets must be finite"):
        mount_reference(folder, scheme=Fp8Scheme(None))


def test_a_quantized_head_beside_a_tied_one_is_refused_with_the_key(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(
        tmp_path / "float", "llama", intermediate_size=128, tie_word_embeddings=True
    )
    stored, _ = quantized(folder, "gptq")
    edit_config(stored, lambda values: values["quantization_config"].update(lm_head=True))
    edit_tensors(stored, lambda t: t.update({"lm_head.qweight": torch.zeros(8, 97).int()}))
    with pytest.raises(CheckpointError, match=r"lm_head.qweight in .* tie_word_embeddings=false"):
        mount_reference(stored)
