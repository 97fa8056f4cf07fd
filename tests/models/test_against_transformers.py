"""Logits of the first-party models at every position, held against `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.helpers.checkpoints import (
    FAMILIES,
    edit_config,
    edit_tensors,
    fuse_experts,
    oracle_logits,
    random_ids,
    tiny_checkpoint,
)
from tests.helpers.mounting import mount_reference
from transformers import AutoModelForCausalLM, PreTrainedModel

from rackmount_registry.errors import CheckpointError, ConfigError

TOLERANCE = 1e-4
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{family} with {num} KV heads": (family, {"num_key_value_heads": num})
        for family in ("llama", "qwen3")
        for num in (1, 2, 4)
    },
    "qwen2": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "llama with wide heads": ("llama", {"head_dim": 24}),
    "llama with attention biases": ("llama", {"attention_bias": True}),
    "llama with mlp biases": ("llama", {"mlp_bias": True}),
    "llama with a large epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "llama with another theta": ("llama", {"rope_parameters": {"rope_theta": 50.0}}),
    "mistral with a window": ("mistral", {"sliding_window": 7, "head_dim": 24}),
    "qwen2 with a window on one layer": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen2 with layer types": (
        "qwen2",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3 with wide heads": ("qwen3", {"head_dim": 24}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3 with a large epsilon": ("qwen3", {"rms_norm_eps": 0.1}),
    "qwen3 with a window": ("qwen3", WINDOW | {"max_window_layers": 0}),
    "qwen3-moe": ("qwen3-moe", {"norm_topk_prob": False}),
    "qwen3-moe renormalized": ("qwen3-moe", {"norm_topk_prob": True}),
    "qwen3-moe, every second layer": ("qwen3-moe", {"decoder_sparse_step": 2}),
    "qwen3-moe, a dense layer": ("qwen3-moe", {"mlp_only_layers": [1]}),
    "qwen3-moe with all experts": ("qwen3-moe", {"num_experts_per_tok": 8}),
    "qwen3-moe with a window": ("qwen3-moe", WINDOW),
    "mixtral": ("mixtral", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 7}),
    "mixtral with wide heads and one expert a token": (
        "mixtral",
        {"head_dim": 24, "num_experts_per_tok": 1},
    ),
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,  # features turn 2.5 times and less over 16 positions
        "original_max_position_embeddings": 16,
    },
    "yarn": YARN,
    "yarn with an attention factor": YARN | {"attention_factor": 1.3},
    "yarn untruncated": YARN | {"truncate": False},
    "yarn with betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn with mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def assert_equal_logits(folder: Path, model: PreTrainedModel, *, length: int = 24) -> None:
    """Two sequences of one step, every position."""
    sequences = random_ids(length, seed=1), random_ids(5, seed=2)
    expected = torch.cat([oracle_logits(model, ids) for ids in sequences])
    assert expected.std() > 0.5
    ours = mount_reference(folder).logits(*sequences)
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers_at_every_position(case: str, tmp_path: Path) -> None:
    family, overrides = MODELS[case]
    assert_equal_logits(*tiny_checkpoint(tmp_path, family, **overrides))


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_only_the_float32_inside_transformers_is_left(
    family: str, tmp_path: Path
) -> None:
    folder, model = tiny_checkpoint(tmp_path, family)
    ids = random_ids(24)
    ours = mount_reference(folder, dtype=torch.float64).logits(ids)
    torch.testing.assert_close(ours, oracle_logits(model.double(), ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("old_spelling", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", ROPES)
def test_each_rope_type_equals_transformers_past_its_original_length(
    case: str, old_spelling: bool, tmp_path: Path
) -> None:
    rope = ROPES[case]
    folder, model = tiny_checkpoint(
        tmp_path, "llama", rope_parameters=rope | {"rope_theta": 1000.0}, head_dim=32
    )
    if old_spelling:
        edit_config(folder, spell_as_before_transformers_5)
    assert_equal_logits(folder, model, length=64)
    if case != "dynamic":  # which is the default rope up to its original length
        ids, stretched = random_ids(64), mount_reference(folder)
        edit_config(folder, lambda c: c.update(rope_scaling=None, rope_parameters=None))
        edit_config(folder, lambda c: c.update(rope_theta=1000.0))
        plain = mount_reference(folder)
        assert (plain.logits(ids) - stretched.logits(ids)).abs().max() > 0.1


def spell_as_before_transformers_5(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type")} | rope


def test_a_part_of_each_head_may_stay_unrotated(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    folder, _ = tiny_checkpoint(tmp_path, "llama", rope_parameters=rope)
    whole, _ = tiny_checkpoint(tmp_path / "whole", "llama", rope_parameters={"rope_theta": 100.0})
    ids = random_ids(24)
    half = mount_reference(folder).logits(ids)
    # Written out: the heads are 16 wide, so features 0-3 turn against 4-7 and 8-15 stay.
    angles = torch.outer(torch.arange(64.0), 100.0 ** -(torch.arange(4) / 4))
    by_hand = mount_reference(whole)
    for layer in by_hand.mounted.draft.attention:
        layer.table = torch.stack((angles.cos(), angles.sin()), 1)
    torch.testing.assert_close(half, by_hand.logits(ids), rtol=0, atol=TOLERANCE)


def test_dynamic_rope_is_refused_past_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
    folder, _ = tiny_checkpoint(tmp_path, "llama", rope_parameters=rope)
    with pytest.raises(
        ConfigError, match=r"max_model_len=65 .*max_position_embeddings=64.*most 64"
    ):
        mount_reference(folder, max_positions=65)


def test_an_unknown_rope_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    edit_config(folder, lambda c: c.update(rope_parameters={"rope_type": "longrope"}))
    with pytest.raises(ConfigError, match=r"'longrope'; choose one of default, linear, .*yarn"):
        mount_reference(folder)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder, model = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    assert_equal_logits(folder, model)


def test_a_stored_copy_of_a_tied_head_changes_nothing(tmp_path: Path) -> None:
    folder, model = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    before = mount_reference(folder)
    assert_equal_logits(folder, model)
    assert HEAD not in {name for name, _ in pieces(before)}


def test_a_stored_head_of_its_own_is_used_though_the_configuration_ties(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0)}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert_equal_logits(folder, model)


def test_a_head_that_is_neither_tied_nor_stored_is_missed(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    edit_tensors(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=f"model needs are not in the checkpoint .*{HEAD}"):
        mount_reference(folder)


def pieces(reference: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every checkpoint tensor that a mounted model has taken."""
    storages = reference.mounted.draft.storages()
    return [(piece.name, piece.shape) for storage in storages for piece in storage.pieces]


def test_a_configuration_that_leaves_out_what_older_files_leave_out(tmp_path: Path) -> None:
    folder, model = tiny_checkpoint(tmp_path, "llama", num_key_value_heads=4)
    optional = ("attention_bias", "head_dim", "mlp_bias", "num_key_value_heads")
    for key in (*optional, "rope_parameters", "tie_word_embeddings", "hidden_act"):
        edit_config(folder, lambda c, key=key: c.pop(key))
    assert_equal_logits(folder, model)


def test_windows_start_at_a_layer_where_a_configuration_lists_no_layer_types(
    tmp_path: Path,
) -> None:
    window = WINDOW | {"max_window_layers": 1}
    folder, model = tiny_checkpoint(tmp_path, "qwen2", **window)
    edit_config(folder, lambda c: c.pop("layer_types"))
    assert_equal_logits(folder, model)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_in_either_spelling(key: str, tmp_path: Path) -> None:
    folder, model = tiny_checkpoint(tmp_path, "qwen3-moe")
    edit_config(folder, lambda c: c.pop("num_experts", None) or c.pop("num_local_experts"))
    edit_config(folder, lambda c: c.update({key: 8}))
    assert_equal_logits(folder, model)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_a_token_cannot_choose_more_experts_than_there_are(family: str, tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, family)
    edit_config(folder, lambda c: c.update(num_experts_per_tok=9))
    rule = r"config\.json.*: num_experts_per_tok=9 must be at most the number of experts, [68]"
    with pytest.raises(ConfigError, match=rule):
        mount_reference(folder)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_may_be_stored_as_transformers_5_holds_them(family: str, tmp_path: Path) -> None:
    folder, model = tiny_checkpoint(tmp_path, family)
    plain = pieces(mount_reference(folder))
    fuse_experts(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert {name for name in stored if ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.{part}_proj"
        for layer in range(2)
        for part in ("gate_up", "down")
    }
    assert not stored & {name for name, _ in plain if "experts" in name or "sparse" in name}
    assert_equal_logits(folder, model)


def test_experts_stored_in_both_spellings_are_refused(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    whole = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(folder, lambda tensors: tensors.update({whole: tensors[name].expand(8, -1, -1)}))
    with pytest.raises(CheckpointError, match=rf"stores \S+ as \S+ in .* and as {whole} in"):
        mount_reference(folder)


def test_a_mixtral_file_without_theta_means_a_million(tmp_path: Path) -> None:
    folder, model = tiny_checkpoint(tmp_path, "mixtral")
    edit_config(folder, lambda c: c.pop("rope_parameters"))
    assert_equal_logits(folder, model)
    edit_config(folder, lambda c: c.update(rope_theta=1e4))
    ids = random_ids(24)
    assert (mount_reference(folder).logits(ids) - oracle_logits(model, ids)).abs().max() > 0.01


def test_another_activation_is_refused(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    edit_config(folder, lambda c: c.update(hidden_act="gelu"))
    with pytest.raises(ConfigError, match="hidden_act='gelu' must be 'silu'"):
        mount_reference(folder)
