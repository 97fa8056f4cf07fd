"""Lists of names hold the weights that are meant, fused or not, and no others."""

import re
from typing import Any

import pytest
from tests.helpers.schemes import read_scheme

from rackmount_quant.names import Names, listed, read_names, substrings, wildcards
from rackmount_registry.errors import ConfigError

LAYER = "model.layers.11"
NAMES = [
    *(f"{LAYER}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"{LAYER}.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    f"{LAYER}.mlp.gate",
    *(f"{LAYER}.mlp.experts.7.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    *(f"{LAYER}.block_sparse_moe.experts.0.{part}" for part in ("w1", "w2", "w3")),
    "lm_head",
]


def meant(names: Names) -> list[str]:
    return [name.removeprefix(f"{LAYER}.") for name in NAMES if name in names]


QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
GATE_UP = ["mlp.gate_proj", "mlp.up_proj"]
EXPERT = ["mlp.experts.7.gate_proj", "mlp.experts.7.up_proj", "mlp.experts.7.down_proj"]


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (f"{LAYER}.self_attn.q_proj", QKV[:1]),
        (f"{LAYER}.self_attn.qkv_proj", QKV),
        ("qkv_proj", QKV),
        (f"{LAYER}.mlp.gate_up_proj", GATE_UP),
        ("mlp.down_proj", ["mlp.down_proj"]),
        ("o_proj", ["self_attn.o_proj"]),
        (f"{LAYER}.self_attn", [*QKV, "self_attn.o_proj"]),
        (f"{LAYER}.mlp.experts", EXPERT),
        (f"{LAYER}.mlp.experts.gate_up_proj", EXPERT[:2]),
        (f"{LAYER}.mlp.experts.down_proj", EXPERT[2:]),
        ("w13", ["block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w3"]),
        ("lm_head", ["lm_head"]),
        ("gate", ["mlp.gate"]),
        ("mlp.gate", ["mlp.gate"]),
        ("model.layers.1", []),
        ("model.layers.1.mlp.gate_up_proj", []),
        ("proj", []),
        ("_proj", []),
        ("", []),
        ("re:mlp", []),
        ("re:.*v_proj", QKV[2:]),
        (r"re:.*\.(q|k)_proj$", QKV[:2]),
        (r"re:.*qkv_proj", QKV),
        (r"re:.*\.mlp\.gate_up_proj$", GATE_UP),
        (r"re:.*\.experts\.gate_up_proj", EXPERT[:2]),
        (r"re:.*mlp\.gate$", ["mlp.gate"]),
        (r"re:model\.layers\.11\.mlp\.experts", EXPERT),
        ("re:.*lm_head", ["lm_head"]),
    ],
)
def test_an_entry_of_a_list_means(entry: str, names: list[str]) -> None:
    assert meant(listed([entry])) == names


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("q_proj", QKV[:1]),
        ("qkv_proj", QKV),
        ("v_proj", QKV[2:]),
        ("gate_up_proj", [*GATE_UP, *EXPERT[:2]]),
        # What AutoAWQ does with Mixtral's list, ["gate"], and with others:
        ("gate", ["mlp.gate_proj", "mlp.gate", "mlp.experts.7.gate_proj"]),
        ("mlp.gate.", []),
        ("layers.1", [name.removeprefix(f"{LAYER}.") for name in NAMES[:-1]]),
        ("self_attn", [*QKV, "self_attn.o_proj"]),
        ("experts.down", EXPERT[2:]),
    ],
)
def test_a_substring_means(entry: str, names: list[str]) -> None:
    assert meant(substrings([entry])) == names


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("lm_head", ["lm_head"]),
        ("*lm_head*", ["lm_head"]),
        ("model.layers.*.mlp.gate", ["mlp.gate"]),
        ("model.layers.1*.self_attn*", [*QKV, "self_attn.o_proj"]),
        ("*.qkv_proj", QKV),
        ("*v_proj", QKV[2:]),
        ("*.mlp.experts.*", EXPERT),
        ("model.layers.11.mlp.gate*", ["mlp.gate_proj", "mlp.gate"]),
        ("MODEL.layers.*", []),
        ("layers.*", []),
        (f"{LAYER}.mlp", [*GATE_UP, "mlp.down_proj", "mlp.gate", *EXPERT]),
        ("model.layers.?.mlp.gate", []),
    ],
)
def test_a_wildcard_means(entry: str, names: list[str]) -> None:
    assert meant(wildcards([entry])) == names


def test_a_list_means_what_any_of_its_entries_means() -> None:
    assert meant(listed(["gate_proj", "up_proj"])) == [*GATE_UP, *EXPERT[:2]]
    assert meant(listed([])) == []


@pytest.mark.parametrize(
    ("names", "unmet"),
    [
        (
            listed(["qkv_proj", "lm_head", "model.layers.12", "q", "re:.*k_proj", "re:.*kproj"]),
            ["model.layers.12", "q", "re:.*kproj"],
        ),
        # Each is met by itself, though the first would do.
        (listed(["mlp", f"{LAYER}.mlp", "mlp.gate", "re:.*mlp", "re:.*gate_up_proj$"]), []),
        (listed([f"{LAYER}.mlp.experts.8", f"{LAYER}.mlp.experts"]), [f"{LAYER}.mlp.experts.8"]),
        (substrings(["self_attn", "visual", "mlp.gate."]), ["mlp.gate.", "visual"]),
        (wildcards(["lm_head", "*.mlp.gate*", "*.visual.*", "mlp"]), ["*.visual.*"]),
        (Names(), []),
    ],
)
def test_entries_that_mean_nothing_are_found(names: Names, unmet: list[str]) -> None:
    assert names.unmet(NAMES) == unmet


def test_keys_are_read_together() -> None:
    read = lambda config: read_names(config, "a", "b", "c")  # noqa: E731
    assert meant(read_scheme(read, {"a": ["q_proj"], "b": None, "c": ["k_proj"]})) == QKV[:2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("q_proj", "a='q_proj' must be a list of names"),
        ([3], "must be a list of names"),
        (["re:("], "broken regular expression"),
    ],
)
def test_what_is_no_list_of_names_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_scheme(lambda config: read_names(config, "a"), {"a": value})
