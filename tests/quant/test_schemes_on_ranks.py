"""Whole checkpoints of every scheme: any number of ranks gives the logits of the same weights in
plain numbers."""

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import edit_config, edit_tensors, random_ids, tiny_checkpoint
from tests.helpers.mounting import Reference, chosen_parts, draft_of, mount_reference
from tests.helpers.quantized import PROJECTION, SCHEMES, quantized
from tests.helpers.ranks import Member, ThreadGroup
from torch import Tensor

from rackmount.loading.safetensors_reader import open_checkpoint
from rackmount_quant.fp8 import Fp8Scheme
from rackmount_quant.rounding import round_e4m3
from rackmount_registry.axes import AXIS_NAMES, Mesh
from rackmount_registry.errors import ConfigError
from rackmount_registry.mount import assemble, fill_randomly
from rackmount_registry.step import ReferenceStep

SEQUENCES = (random_ids(9, seed=1), random_ids(1, seed=2), random_ids(5, seed=3))
WIDE = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 512}


def logits_of_ranks(
    folder: Path, size: int, mesh_of: Callable[[Member], Mesh], scheme: Any = None
) -> list[Tensor]:
    group = ThreadGroup(size)
    ranks = [
        mount_reference(folder, dtype=torch.float64, mesh=mesh_of(member), scheme=scheme)
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_plain_checkpoint_is_rounded_while_it_is_loaded(
    family: str, size: int, tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", family)
    plain = copytree(folder, tmp_path / "plain")

    def round_rows(tensors: dict[str, Tensor]) -> None:
        """A row has a scale for each rank that holds some of its columns."""
        for name in [name for name in tensors if PROJECTION.search(name)]:
            num_cuts = size if re.search(r"(o|down)_proj", name) else 1
            shares = [round_e4m3(each, "channel") for each in tensors[name].chunk(num_cuts, 1)]
            rows = [values.float() * scales.unsqueeze(-1) for values, scales in shares]
            tensors[name] = torch.cat(rows, 1)

    edit_tensors(plain, round_rows)
    expected = mount_reference(plain, dtype=torch.float64).logits(*SEQUENCES)
    for logits in logits_of_ranks(folder, size, Mesh.tensor_parallel, Fp8Scheme(None)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


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
