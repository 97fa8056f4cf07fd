"""Whole checkpoints of every scheme: any number of ranks gives the logits of the same weights in
plain numbers, and what is wrong with one is refused by layer, file and rule."""

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import edit_config, edit_tensors, random_ids, tiny_checkpoint
from tests.helpers.mounting import Reference, chosen_parts, draft_of, mount_reference
from tests.helpers.packings import awq_tensors, compressed_tensors, gptq_tensors, random_grouped
from tests.helpers.ranks import Member, ThreadGroup
from torch import Tensor

from rackmount.loading.safetensors_reader import open_checkpoint
from rackmount_quant.fp8 import Fp8Scheme
from rackmount_quant.rounding import round_blocks, round_e4m3, round_int8
from rackmount_registry.axes import AXIS_NAMES, Mesh
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.mount import assemble, fill_randomly
from rackmount_registry.step import ReferenceStep

SEQUENCES = (random_ids(9, seed=1), random_ids(1, seed=2), random_ids(5, seed=3))
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
WIDE = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 512}

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


def logits_of_ranks(folder: Path, size: int, mesh_of: Callable[[Member], Mesh]) -> list[Tensor]:
    group = ThreadGroup(size)
    ranks = [
        mount_reference(folder, dtype=torch.float64, mesh=mesh_of(member))
        for member in group.members
    ]
    return group.run(lambda rank: ranks[rank].logits(*SEQUENCES))


def with_random_weights(folder: Path, mesh: Mesh) -> Reference:
    """The model of a configuration, each weight drawn and rounded as its scheme stores it."""
    step, checkpoint = ReferenceStep(), open_checkpoint(folder)
    drafted = draft_of(checkpoint, dtype=torch.float64, mesh=mesh)
    checkpoint.close()
    parts = chosen_parts(drafted)
    mounted = assemble(drafted, parts, step, device=torch.device("cpu"), max_positions=64)
    fill_randomly(mounted, seed=7)
    return Reference(mounted=mounted, step=step, bytes_read=0)


def experts_cut(member: Member) -> Mesh:
    return Mesh(groups={name: member for name in AXIS_NAMES if name != "expert_ffn"})


def sizes(case: str, family: str) -> dict[str, Any]:
    if case == "fp8 by block":
        return WIDE | ({"moe_intermediate_size": 512} if family == "qwen3-moe" else {})
    return {"intermediate_size": 128} | (
        {"moe_intermediate_size": 64} if family == "qwen3-moe" else {}
    )


@pytest.mark.parametrize("case", SCHEMES)
def test_ranks_give_the_logits_of_the_plain_weights(case: str, tmp_path: Path) -> None:
    overrides = {"attention_bias": True} | sizes(case, "llama")
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", **overrides)
    stored, plain = quantized(folder, case)
    expected = mount_reference(plain, dtype=torch.float64).logits(*SEQUENCES)
    assert expected.std() > 0.1
    for size in (1, 2, 4):
        for logits in logits_of_ranks(stored, size, Mesh.tensor_parallel):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", SCHEMES)
def test_experts_do_too(case: str, tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 1, "num_experts": 4} | sizes(case, "qwen3-moe")
    folder, _ = tiny_checkpoint(tmp_path / "float", "qwen3-moe", **overrides)
    stored, plain = quantized(folder, case)
    expected = mount_reference(plain, dtype=torch.float64).logits(*SEQUENCES)
    assert expected.std() > 0.1
    for size, mesh_of in ((1, experts_cut), (2, Mesh.tensor_parallel), (2, experts_cut)):
        for logits in logits_of_ranks(stored, size, mesh_of):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def with_biases(tensors: dict[str, Tensor]) -> None:
    """As AutoGPTQ saved them: zeros where there were none."""
    for name in [name for name in tensors if name.endswith(".qweight")]:
        zeros = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
        tensors.setdefault(name.replace(".qweight", ".bias"), zeros)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_biases_of_zeros_change_nothing(family: str, tmp_path: Path) -> None:
    """Beside those that the model has."""
    overrides = {"attention_bias": True, "num_hidden_layers": 1} | sizes("gptq", family)
    folder, _ = tiny_checkpoint(tmp_path / "float", family, **overrides)
    edit_tensors(folder, lambda t: [t[n].normal_() for n in t if n.endswith("_proj.bias")])
    stored, _ = quantized(folder, "gptq")
    expected = mount_reference(stored, dtype=torch.float64).logits(*SEQUENCES)
    edit_tensors(stored, with_biases)
    assert torch.equal(mount_reference(stored, dtype=torch.float64).logits(*SEQUENCES), expected)
    for logits in logits_of_ranks(stored, 2, Mesh.tensor_parallel):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    if family == "qwen3-moe":
        for logits in logits_of_ranks(stored, 2, experts_cut):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", SCHEMES)
def test_random_weights_are_rounded_and_the_same_on_any_ranks(case: str, tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama", **sizes(case, "llama"))
    config = SCHEMES[case][0]
    edit_config(folder, lambda values: values.update(quantization_config=config))
    one = with_random_weights(folder, Mesh())
    expected = one.logits(*SEQUENCES)
    assert len(one.mounted.draft.formats()["linear"] - {"dense"}) == 1  # but for the head
    assert expected.std() > 1e-3
    group = ThreadGroup(2)
    ranks = [with_random_weights(folder, Mesh.tensor_parallel(each)) for each in group.members]
    for logits in group.run(lambda rank: ranks[rank].logits(*SEQUENCES)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_blocks_may_be_short_where_no_rank_cuts_them(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama")
    stored, plain = quantized(folder, "fp8 by block")
    expected = mount_reference(plain, dtype=torch.float64).logits(*SEQUENCES)
    logits = mount_reference(stored, dtype=torch.float64).logits(*SEQUENCES)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    mesh = Mesh.tensor_parallel(ThreadGroup(2).members[0])
    with pytest.raises(ConfigError, match=r"2 ranks cut .* not a multiple of 128 as its format"):
        mount_reference(stored, mesh=mesh)


def test_groups_that_ranks_would_cut_are_refused_with_the_numbers(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", intermediate_size=96)
    stored, _ = quantized(folder, "gptq")
    mesh = Mesh.tensor_parallel(ThreadGroup(4).members[1])
    with pytest.raises(ConfigError, match=r"down_proj: 4 ranks cut its in dimension of 96 at 24"):
        mount_reference(stored, mesh=mesh)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_plain_checkpoint_is_rounded_while_it_is_loaded(family: str, tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", family)
    plain = copytree(folder, tmp_path / "plain")

    def round_rows(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if PROJECTION.search(name)]:
            values, scales = round_e4m3(tensors[name], "channel")
            tensors[name] = values.float() * scales.unsqueeze(-1)

    edit_tensors(plain, round_rows)
    expected = mount_reference(plain, dtype=torch.float64).logits(*SEQUENCES)
    online = mount_reference(folder, dtype=torch.float64, scheme=Fp8Scheme(None))
    torch.testing.assert_close(online.logits(*SEQUENCES), expected, rtol=0, atol=1e-10)


def test_plain_weights_that_are_not_finite_are_not_rounded(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj"
    edit_tensors(folder, lambda tensors: tensors[f"{name}.weight"][1, 2].fill_(torch.inf))
    with pytest.raises(CheckpointError, match=rf"{name} .*scales that weight gets must be finite"):
        mount_reference(folder, scheme=Fp8Scheme(None))


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
    "weights of another type": (
        "int8 by channel",
        lambda t: t.update({f"{LAYER}.up_proj.weight": torch.ones(128, 64)}),
        rf"{LAYER}.up_proj.weight in model.safetensors is float32, the model needs int8",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_wrong_is_refused_by_layer_file_and_rule(broken: str, tmp_path: Path) -> None:
    case, edit, message = BROKEN[broken]
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", intermediate_size=128)
    stored, _ = quantized(folder, case)
    edit_tensors(stored, edit)
    with pytest.raises(CheckpointError, match=message):
        mount_reference(stored)


@pytest.mark.parametrize("entries", [["mlp.gate_up_proj"], ["re:.*mlp.(gate|up)_proj"]])
def test_ignored_projections_stay_plain_beside_quantized_ones(
    entries: list[str], tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama", intermediate_size=128)
    stored, plain = quantized(folder, "packed")
    dense = {}
    edit_tensors(plain, lambda t: dense.update(t))

    def put_back(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.search(r"\.(gate|up)_proj\.", name)]:
            del tensors[name]
        tensors.update({n: t for n, t in dense.items() if re.search(r"\.(gate|up)_proj\.", n)})

    edit_tensors(stored, put_back)
    edit_config(stored, lambda c: c["quantization_config"].update(ignore=["lm_head", *entries]))
    expected = mount_reference(plain, dtype=torch.float64).logits(*SEQUENCES)
    reference = mount_reference(stored, dtype=torch.float64)
    torch.testing.assert_close(reference.logits(*SEQUENCES), expected, rtol=0, atol=1e-10)
    assert reference.mounted.draft.formats()["linear"] == {"dense", "int4_groups"}
