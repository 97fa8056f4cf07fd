"""The scheme awq: which layout is read, and that it stays exact."""

import re
from typing import Any

import pytest
import torch
from tests.helpers import gptqmodel
from tests.helpers.packings import awq_tensors, random_grouped
from tests.helpers.schemes import dense_of, load, load_bundle, read_scheme

from rackmount_quant.awq import AwqScheme, awq_format
from rackmount_quant.rounding import round_groups
from rackmount_registry.errors import CheckpointError, ConfigError

CONFIG: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def scheme(**changes: Any) -> AwqScheme:
    return read_scheme(AwqScheme, CONFIG | changes)


@pytest.mark.parametrize("group", [16, 32, -1])
@pytest.mark.parametrize(("parts", "size"), [((8,), 32), ((16, 8, 8), 64), ((24, 24), 96)])
def test_what_autoawq_packs_is_unpacked(group: int, parts: tuple[int, ...], size: int) -> None:
    weights = [random_grouped(part, size, group=group, seed=i) for i, part in enumerate(parts)]
    finished = load(awq_format(group), [awq_tensors(w) for w in weights], parts, size)
    assert finished.format == "int4_groups" and finished.parts == parts
    assert finished.tensors["values"].shape == (sum(parts), size // 8)
    for index, weight in enumerate(weights):
        assert torch.equal(finished.dequantize(index), weight.dense)


def test_experts_are_unpacked_together() -> None:
    experts = [
        [random_grouped(16, 64, group=32, seed=2 * e + part) for part in range(2)] for e in range(3)
    ]
    packed = [[awq_tensors(part) for part in expert] for expert in experts]
    bundle = load_bundle(awq_format(32), packed, (16, 16), 64)
    for e, expert in enumerate(experts):
        dense = torch.cat([part.dense for part in expert])
        assert torch.equal(bundle.expert(e).dequantize(), dense)


def test_without_zero_points_they_are_eight_wherever_they_are_left_out() -> None:
    weight = random_grouped(8, 32, group=16, symmetric=True)
    packed = awq_tensors(weight)
    stored = awq_format(16, zero_point=False)
    for tensors in (packed, {name: t for name, t in packed.items() if name != "qzeros"}):
        assert torch.equal(load(stored, [tensors], (8,), 32).dequantize(), weight.dense)
    assert not awq_format(16).slots[1].optional


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("zero_point", [True, False])
def test_what_is_encoded_is_rounded_and_no_more(group: int, zero_point: bool) -> None:
    dense = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    stored = awq_format(group, zero_point=zero_point)
    assert stored.encode is not None
    finished = load(stored, [stored.encode(dense)], (16,), 64)
    size = 64 if group == -1 else group
    rounded = round_groups(dense, 4, size, symmetric=not zero_point, dtype=torch.float16)
    assert torch.equal(finished.dequantize(), dense_of(*rounded, group))
    assert ("zeros" in finished.tensors) == zero_point


def test_keys_are_read_in_both_spellings() -> None:
    old = read_scheme(AwqScheme, {"quant_method": "awq", "w_bit": 4, "q_group_size": 64})
    stored = old.format_for("model.layers.0.mlp.up_proj", (8, 128), "linear")
    assert stored == awq_format(64)


def test_what_is_not_converted_is_plain() -> None:
    chosen = scheme(modules_to_not_convert=["gate", "layers.1."])
    for name, plain in (
        ("model.layers.0.mlp.up_proj", False),
        ("model.layers.0.mlp.gate_proj", True),
        ("model.layers.1.mlp.up_proj", True),
    ):
        assert (chosen.format_for(name, (8, 32), "linear") is None) == plain
    assert chosen.format_for("model.layers.0.mlp.up", (8, 32), "router") is None
    assert chosen.format_for("lm_head", (8, 32), "head") is None
    assert scheme().kv_cache is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits=3 must be 4"),
        ({"w_bit": 8}, "w_bit=8 disagrees with bits=4"),
        ({"version": "gemv"}, "version='gemv' is another layout than 'gemm'"),
        ({"version": "gemv_fast"}, "version='gemv_fast'"),
        ({"version": "llm-awq"}, "version='llm-awq'"),
        ({"format": "marlin"}, "format='marlin'"),
        ({"backend": "llm-awq"}, "backend='llm-awq' must be"),
        ({"group_size": 0}, "group_size=0 must be a positive number of columns"),
        ({"group_size": "32"}, "group_size='32' must be"),
        ({"zero_point": 1}, "zero_point=1 must be True or False"),
        ({"modules_to_not_convert": "gate"}, "must be a list of names"),
        ({"lm_head": True}, "lm_head=True must be False"),
        ({"new_layout": True}, "new_layout"),
    ],
)
def test_what_is_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(**changes)


@pytest.mark.parametrize(
    ("changes", "zero_point"),
    [
        ({}, True),
        ({"zero_point": False}, False),
        ({"rotation": None, "adapter": None, "meta": None, "dynamic": None}, True),
        (gptqmodel.NOTES_OF_5, True),
    ],
)
def test_what_gptqmodel_writes_is_read(changes: Any, zero_point: bool) -> None:
    found = read_scheme(AwqScheme, {**gptqmodel.AWQ, **changes})
    stored = found.format_for("model.layers.0.mlp.up_proj", (8, 256), "linear")
    assert stored == awq_format(128, zero_point=zero_point)


@pytest.mark.parametrize("key", gptqmodel.CHANGES_NUMBERS)
def test_what_gptqmodel_does_to_products_is_refused(key: str) -> None:
    given = {key: gptqmodel.CHANGES_NUMBERS[key]}
    for changes in (given, {"meta": {**gptqmodel.META, **given}}, {"dynamic": {".*up": given}}):
        with pytest.raises(ConfigError, match=f"{key}=|dynamic="):
            read_scheme(AwqScheme, {**gptqmodel.AWQ, **changes})


def test_both_spellings_that_gptqmodel_writes_are_read() -> None:
    names = {"format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32"}
    scheme(method="awq", **names)
    with pytest.raises(ConfigError, match="method='gptq' disagrees with quant_method='awq'"):
        scheme(method="gptq", **names)


def test_what_transformers_adds_is_harmless() -> None:
    scheme(format="gemm", backend="auto", desc_act=False, sym=True, damp_percent=0.1, meta=None)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((12, 64), "bits=4 puts 8 rows in a word, and x has 12"),
        ((16, 48), "group_size=32 means groups of 32 columns, and x has 48"),
    ],
)
def test_shapes_that_do_not_fill_words_or_groups_are_refused(
    shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scheme(group_size=32).format_for("x", shape, "linear")
    with pytest.raises(ConfigError, match=r"q_group_size=32 means|w_bit=4 puts"):
        spelled = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}
        read_scheme(AwqScheme, spelled).format_for("x", shape, "linear")


def test_scales_of_zero_are_refused() -> None:
    packed = awq_tensors(random_grouped(8, 32, group=16))
    packed["scales"][1, 3] = 0
    with pytest.raises(CheckpointError, match=r"1 of 16 are not: 0\.0"):
        load(awq_format(16), [packed], (8,), 32)
