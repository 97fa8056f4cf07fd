"""Every mount for rank r of n, joined by threads, equals the model of a single rank."""

import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.checkpoints import quantize_w8, random_ids, tiny_checkpoint
from tests.helpers.mounting import Reference, mount_reference
from tests.helpers.ranks import Member, ThreadGroup
from torch import Tensor

from rackmount_registry.axes import AXIS_NAMES, Mesh
from rackmount_registry.errors import ConfigError

SEQUENCES = (random_ids(17, seed=1), random_ids(1, seed=2), random_ids(6, seed=3))
NUM_LAYERS = 2

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama with replicated KV heads": ("llama", {"num_key_value_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama with an even vocabulary": ("llama", {"vocab_size": 96}),
    "llama with less vocabulary than ranks need": ("llama", {"vocab_size": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 with replicated KV heads": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3-moe": ("qwen3-moe", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}


def experts_cut(member: Member) -> Mesh:
    """Experts over the ranks that split everything else; each expert whole."""
    return Mesh(groups={name: member for name in AXIS_NAMES if name != "expert_ffn"})


def run_ranks(
    folder: Path, group: ThreadGroup, mesh_of: Callable[[Member], Mesh], *sequences: Tensor
) -> tuple[list[Reference], list[Tensor]]:
    """Mounts every rank in float64 and runs them together: what was mounted, each rank's logits."""
    ranks = [
        mount_reference(folder, dtype=torch.float64, mesh=mesh_of(member))
        for member in group.members
    ]
    return ranks, group.run(lambda rank: ranks[rank].logits(*sequences))


def assert_ranks_equal_one(
    folder: Path,
    size: int,
    mesh_of: Callable[[Member], Mesh] = Mesh.tensor_parallel,
    *,
    one: Path | None = None,
) -> None:
    """All ranks of `folder` against the whole model in `one`, by default the same folder."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    sequences = [ids % vocab_size for ids in SEQUENCES]
    expected = mount_reference(one or folder, dtype=torch.float64).logits(*sequences)
    assert expected.std() > 0.5
    _, logits = run_ranks(folder, ThreadGroup(size), mesh_of, *sequences)
    for each in logits:
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", DENSE)
def test_tensor_parallel_ranks_equal_one(case: str, size: int, tmp_path: Path) -> None:
    family, overrides = DENSE[case]
    folder, _ = tiny_checkpoint(tmp_path, family, **overrides)
    assert_ranks_equal_one(folder, size)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_split_the_experts_equal_one(size: int, tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    assert_ranks_equal_one(folder, size, experts_cut)


def test_experts_may_be_split_over_one_group_and_their_width_over_another(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    rows, columns = ([ThreadGroup(2), ThreadGroup(2)] for _ in range(2))

    def grid(member: Member) -> Mesh:
        row, column = divmod(member.rank, 2)
        whole = {name: member for name in AXIS_NAMES}
        return Mesh(
            groups=whole
            | {"expert_ffn": rows[row].members[column], "experts": columns[column].members[row]}
        )

    assert_ranks_equal_one(folder, 4, grid)


def test_data_parallel_attention_needs_no_other_model(tmp_path: Path) -> None:
    """Attention whole on every rank, the rest split: another mapping of the same file."""
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe", decoder_sparse_step=2)
    split = ("experts", "ffn", "vocab")
    assert_ranks_equal_one(folder, 2, lambda m: Mesh(groups={name: m for name in split}))


@pytest.mark.parametrize("mesh_of", [Mesh.tensor_parallel, experts_cut])
def test_a_step_has_two_sums_a_layer_and_one_for_the_embedding(
    mesh_of: Callable[[Member], Mesh], tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe", decoder_sparse_step=2, attention_bias=True)
    group = ThreadGroup(2)
    run_ranks(folder, group, mesh_of, *SEQUENCES)
    expected = {"all_reduce": 2 * NUM_LAYERS + 1, "all_gather": 1}
    assert [dict(member.calls) for member in group.members] == [expected] * 2


def test_every_rank_gives_the_same_bits(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    _, logits = run_ranks(folder, ThreadGroup(4), Mesh.tensor_parallel, *SEQUENCES)
    assert all(torch.equal(each, logits[0]) for each in logits)


def test_zero_tokens_are_an_ordinary_step(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    _, logits = run_ranks(folder, ThreadGroup(2), experts_cut, torch.empty(0, dtype=torch.int64))
    assert [each.shape for each in logits] == [(0, 97)] * 2


def test_a_rank_whose_experts_nobody_chose_takes_part(tmp_path: Path) -> None:
    """One token with one expert: the other rank has none."""
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe", num_experts_per_tok=1)
    for seed in range(4):
        token = random_ids(1, seed=seed)
        expected = mount_reference(folder, dtype=torch.float64).logits(token)
        _, logits = run_ranks(folder, ThreadGroup(2), experts_cut, token)
        for each in logits:
            torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)


def share_of(reference: Reference) -> dict[str, int]:
    """Tensor -> elements that this rank takes of it."""
    return {
        piece.name: prod(
            len(range(*at.indices(n))) for at, n in zip(piece.index, piece.shape, strict=True)
        )
        for storage in reference.mounted.draft.storages()
        for piece in storage.pieces
    }


@pytest.mark.parametrize("mesh_of", [Mesh.tensor_parallel, experts_cut])
def test_each_rank_reads_its_own_share_and_no_more(
    mesh_of: Callable[[Member], Mesh], tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe", decoder_sparse_step=2, attention_bias=True)
    stored = {
        name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    ranks, _ = run_ranks(folder, ThreadGroup(2), mesh_of, *SEQUENCES)
    shares = [share_of(rank) for rank in ranks]
    for name, whole in stored.items():
        taken = [share.get(name, 0) for share in shares]
        if re.search(r"norm|mlp\.gate\.|o_proj\.bias", name):
            assert taken == [whole, whole], name
        else:
            assert sum(taken) == whole, name
    # Stored in float32 and held in float64.
    assert [rank.bytes_read for rank in ranks] == [4 * sum(share.values()) for share in shares]
    assert [rank.mounted.draft.weight_bytes for rank in ranks] == [2 * r.bytes_read for r in ranks]


W8: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "all int8": ("llama", {}, "none", []),
    "q dense, k and v int8": (
        "llama",
        {"attention_bias": True, "num_key_value_heads": 1},
        "q_proj",
        ["q_proj"],
    ),
    "gate dense, up int8": ("qwen3", {}, "gate_proj", ["mlp.gate_proj"]),
    "o and one down dense": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        r"o_proj|0\.mlp\.down_proj",
        ["self_attn.o_proj", "model.layers.0.mlp.down_proj"],
    ),
    "int8 experts, some dense parts": (
        "qwen3-moe",
        {"decoder_sparse_step": 2},
        r"v_proj|0\.mlp\.gate_proj",
        [r"re:.*\.v_proj", "layers.0.mlp.gate_proj"],
    ),
    "dense experts": ("qwen3-moe", {}, "experts", ["re:.*experts"]),
}
"""Case -> family, configuration, pattern of the projections that stay dense, `ignore`."""


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", W8)
def test_int8_ranks_equal_one_with_the_dequantized_weights(
    case: str, size: int, tmp_path: Path
) -> None:
    family, overrides, dense, ignore = W8[case]
    folder, _ = tiny_checkpoint(tmp_path / "float", family, **overrides)
    quantized, plain = quantize_w8(folder, lambda name: bool(re.search(dense, name)), ignore)
    assert_ranks_equal_one(quantized, size, one=plain)
    if family == "qwen3-moe":
        assert_ranks_equal_one(quantized, size, experts_cut, one=plain)


def test_dense_and_int8_parts_of_a_projection_are_products_of_their_own(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "llama")
    ignored = ("q_proj", "gate_proj")
    quantized, _ = quantize_w8(folder, lambda name: name.endswith(ignored), list(ignored))
    block = mount_reference(quantized).mounted.draft.model.model.layers[0]
    assert [gemm.indexes for gemm in block.self_attn.qkv.gemms] == [[0], [1, 2]]
    assert [gemm.indexes for gemm in block.mlp.gate_up.gemms] == [[0], [1]]


def test_experts_of_mixed_formats_are_refused(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "float", "qwen3-moe")
    quantized, _ = quantize_w8(folder, lambda name: "down_proj" in name, ["down_proj"])
    with pytest.raises(ConfigError, match=r"layers.0.mlp.experts: the experts .* not dense, w8"):
        mount_reference(quantized)


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "heads": ("llama", {"num_key_value_heads": 4}, 3, "3 ranks do not divide heads=4; .*1, 2, 4"),
    "kv_heads": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4},
        6,
        "6 ranks do not divide kv_heads=4; choose one of 1, 2, 4, or a multiple of 4",
    ),
    "ffn": ("llama", {"intermediate_size": 98}, 4, "ffn=98; choose one of 1, 2, 7, 14, 49, 98"),
    "expert_ffn": ("qwen3-moe", {"moe_intermediate_size": 30}, 4, "expert_ffn=30; .*5, 6, 10"),
}


@pytest.mark.parametrize("axis", REFUSED)
def test_ranks_that_divide_no_axis_are_refused_with_the_legal_counts(
    axis: str, tmp_path: Path
) -> None:
    family, overrides, size, message = REFUSED[axis]
    folder, _ = tiny_checkpoint(tmp_path, family, **overrides)
    mesh = Mesh.tensor_parallel(ThreadGroup(size).members[0])
    with pytest.raises(ConfigError, match=message):
        mount_reference(folder, mesh=mesh)


def test_one_group_cannot_split_experts_and_their_width(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    member = ThreadGroup(2).members[0]
    with pytest.raises(ConfigError, match=r"one group .* cannot split both"):
        mount_reference(folder, mesh=Mesh(groups={name: member for name in AXIS_NAMES}))
