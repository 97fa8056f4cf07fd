"""The scheme gptq: which layouts are read, and that each stays exact."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import gptqmodel
from tests.helpers.packings import gptq_tensors, random_grouped
from tests.helpers.schemes import dense_of, load, load_bundle, read_scheme

from rackmount_quant.gptq import GptqScheme, Layout, gptq_format
from rackmount_quant.rounding import round_groups
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.formats import StoredFormat

CONFIG: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}
UP = "model.layers.0.mlp.up_proj"


def scheme(**changes: Any) -> GptqScheme:
    return read_scheme(GptqScheme, CONFIG | changes)


def stored_as(size: int, **changes: Any) -> StoredFormat:
    stored = scheme(**changes).format_for(UP, (8, size), "linear")
    assert stored is not None
    return stored


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "size"), [(32, 96), (64, 64), (-1, 48), (32, 80), (16, 36)])
@pytest.mark.parametrize("act_order", [False, True])
def test_what_gptq_packs_is_unpacked(
    version: str, bits: int, group: int, size: int, act_order: bool
) -> None:
    stored = stored_as(
        size, bits=bits, group_size=group, desc_act=act_order, checkpoint_format=version
    )
    first = random_grouped(12, size, bits=bits, group=group, act_order=act_order, seed=1)
    second = random_grouped(9, size, bits=bits, group=group, groups=first.groups, seed=2)
    packed = [gptq_tensors(weight, v2=version == "gptq_v2") for weight in (first, second)]
    finished = load(stored, packed, (12, 9), size)
    assert finished.format == stored.yields == f"int{bits}_groups"
    assert torch.equal(finished.dequantize(0), first.dense)
    assert torch.equal(finished.dequantize(1), second.dense)


def test_zero_points_of_the_first_version_wrap_around_without_carrying() -> None:
    weight = random_grouped(16, 32, group=32)
    weight.zeros[:, 0] = torch.arange(16)
    packed = gptq_tensors(weight)
    assert packed["qzeros"][0, 0] == 0x6543210F  # 0 is stored as 15, the rest less one
    assert torch.equal(load(stored_as(32), [packed], (16,), 32).dequantize(), weight.dense)


def test_symmetric_zero_points_are_left_out_of_what_kernels_read() -> None:
    weight = random_grouped(8, 64, group=32, symmetric=True)
    packed = gptq_tensors(weight)
    assert (packed["qzeros"] == 0x77777777).all()
    finished = load(stored_as(64), [packed], (8,), 64)
    assert "zeros" not in finished.tensors and torch.equal(finished.dequantize(), weight.dense)


def test_g_idx_may_be_missing_where_columns_are_in_order() -> None:
    weight = random_grouped(8, 64, group=32)
    packed = gptq_tensors(weight)
    del packed["g_idx"]
    assert torch.equal(load(stored_as(64), [packed], (8,), 64).dequantize(), weight.dense)
    assert not stored_as(64, desc_act=True).slots[3].optional
    assert stored_as(64, desc_act=True, group_size=-1).slots[3].optional


def test_columns_out_of_order_without_desc_act_are_refused() -> None:
    packed = gptq_tensors(random_grouped(8, 64, group=32, act_order=True))
    with pytest.raises(CheckpointError, match="g_idx must be the column // 32"):
        load(stored_as(64), [packed], (8,), 64)


@pytest.mark.parametrize("size", [32, -1])
@pytest.mark.parametrize("first", [1, 2, 4, -2])
def test_groups_that_begin_elsewhere_without_desc_act_are_refused(first: int, size: int) -> None:
    """By as many groups as there are, too."""
    packed = gptq_tensors(random_grouped(8, 64, group=64 if size == -1 else size))
    packed["g_idx"] += first
    rule = (
        rf"g_idx must be the column // {abs(size) if size > 0 else 64}, .* column 0 it is {first}"
    )
    with pytest.raises(CheckpointError, match=rule):
        load(stored_as(64, group_size=size), [packed], (8,), 64)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("written", "read"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_symmetric_zeros_of_another_version_are_refused(bits: int, written: str, read: str) -> None:
    weight = random_grouped(8, 64, group=32, bits=bits, symmetric=True)
    packed = gptq_tensors(weight, v2=written == "gptq_v2")
    load(stored_as(64, bits=bits, checkpoint_format=written), [packed], (8,), 64)
    with pytest.raises(CheckpointError, match=rf"qzeros are all .* as checkpoint_format {read}"):
        load(stored_as(64, bits=bits, checkpoint_format=read), [packed], (8,), 64)


def test_a_bias_that_the_model_has_not_must_be_zero() -> None:
    weight = random_grouped(8, 64, group=32)
    packed = gptq_tensors(weight) | {"bias": torch.zeros(8).half()}
    assert torch.equal(load(stored_as(64), [packed], (8,), 64).dequantize(), weight.dense)
    for value in (2.0**-24, float("nan")):
        packed["bias"][3] = value
        with pytest.raises(CheckpointError, match=r"bias must be 0, .* and 1 of 8 values are not"):
            load(stored_as(64), [packed], (8,), 64)


def test_g_idx_beyond_the_groups_is_refused() -> None:
    packed = gptq_tensors(random_grouped(8, 64, group=32, act_order=True))
    packed["g_idx"][5] = 2
    with pytest.raises(CheckpointError, match="must be from 0 to 1, and are from 0 to 2"):
        load(stored_as(64, desc_act=True), [packed], (8,), 64)


def test_experts_with_act_order_are_unpacked_together() -> None:
    experts = []
    for e in range(3):
        gate = random_grouped(8, 64, group=16, act_order=True, seed=e)
        experts.append([gate, random_grouped(8, 64, group=16, groups=gate.groups, seed=e + 9)])
    packed = [[gptq_tensors(part) for part in expert] for expert in experts]
    bundle = load_bundle(stored_as(64, desc_act=True, group_size=16), packed, (8, 8), 64)
    for e, expert in enumerate(experts):
        dense = torch.cat([part.dense for part in expert])
        assert torch.equal(bundle.expert(e).dequantize(), dense)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, -1)])
def test_what_is_encoded_is_rounded_and_no_more(
    version: str, sym: bool, act_order: bool, bits: int, group: int
) -> None:
    dense = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    stored = stored_as(
        64, bits=bits, group_size=group, sym=sym, desc_act=act_order, checkpoint_format=version
    )
    assert stored.encode is not None
    finished = load(stored, [stored.encode(dense)], (16,), 64)
    size = 64 if group == -1 else group
    rounded = round_groups(dense, bits, size, symmetric=sym, dtype=torch.float16)
    assert torch.equal(finished.dequantize(), dense_of(*rounded, group))
    assert ("zeros" not in finished.tensors) == sym


def test_parts_of_one_layout_are_of_one_format_whatever_their_rows() -> None:
    chosen = scheme(desc_act=True)
    q = chosen.format_for("model.layers.0.self_attn.q_proj", (64, 64), "linear")
    k = chosen.format_for("model.layers.0.self_attn.k_proj", (16, 64), "linear")
    assert q == k
    assert q != scheme().format_for("model.layers.0.self_attn.q_proj", (64, 64), "linear")


def test_dynamic_rules_change_layouts_and_the_first_match_counts() -> None:
    chosen = scheme(
        dynamic={
            r"-:.*\.layers\.0\.mlp\.gate_up_proj": {},
            r".*\.layers\.0\.mlp": {"bits": 8},
            r"+:.*\.layers\.1\.": {"group_size": 64, "desc_act": True, "damp_percent": 0.2},
            r".*\.mlp\.down_proj": {"bits": 8},
            r"-:layers\.2": {},
        }
    )

    def layer(name: str) -> StoredFormat | None:
        return chosen.format_for(f"model.layers.{name}", (64, 128), "linear")

    base = Layout(bits=4, group=32, act_order=False, symmetric=True, zeros_less_one=True)
    eight = Layout(bits=8, group=32, act_order=False, symmetric=True, zeros_less_one=True)
    ordered = Layout(bits=4, group=64, act_order=True, symmetric=True, zeros_less_one=True)
    assert layer("0.mlp.gate_proj") is None and layer("0.mlp.up_proj") is None
    assert layer("0.mlp.down_proj") == gptq_format(eight, 128)
    assert layer("1.mlp.down_proj") == gptq_format(ordered, 128)
    assert layer("2.mlp.down_proj") == gptq_format(eight, 128)
    assert layer("2.mlp.up_proj") == gptq_format(base, 128)


def test_modules_in_block_to_quantize_are_all_that_is_quantized() -> None:
    modules = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    for listed in (modules, [name for names in modules for name in names]):
        chosen = scheme(modules_in_block_to_quantize=listed)
        for name, quantized in (("self_attn.q_proj", 1), ("self_attn.v_proj", 0), (UP[15:], 0)):
            found = chosen.format_for(f"model.layers.3.{name}", (8, 32), "linear")
            assert (found is not None) == quantized


def test_routers_are_plain_and_heads_as_the_checkpoint_says() -> None:
    assert scheme().format_for("model.layers.0.mlp.gate", (8, 32), "router") is None
    assert scheme().format_for("lm_head", (96, 32), "head") is None
    assert scheme(lm_head=True).format_for("lm_head", (96, 32), "head") is not None
    modules = {"lm_head": True, "modules_in_block_to_quantize": ["mlp.up_proj"]}
    assert scheme(**modules).format_for("lm_head", (96, 32), "head") is not None
    excluded = scheme(lm_head=True, dynamic={"-:lm_head": {}})
    assert excluded.format_for("lm_head", (96, 32), "head") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits=3 must be 4 or 8"),
        ({"bits": 2}, "bits=2 must be 4 or 8"),
        ({"group_size": -2}, "group_size=-2 must be a positive number of columns"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin' must be 'gptq' or"),
        ({"format": "gptq_v2"}, "format='gptq_v2' disagrees with checkpoint_format='gptq'"),
        ({"pack_dtype": "int16"}, "pack_dtype='int16' must be 'int32'"),
        ({"is_marlin_format": True}, "is_marlin_format=True must be False"),
        ({"adapter": {"name": "lora"}}, "adapter={'name': 'lora'} must be None"),
        ({"rotation": "hadamard"}, "rotation='hadamard' must be None"),
        ({"sym": "yes"}, "sym='yes' must be True or False"),
        ({"dynamic": ["-:a"]}, "dynamic=['-:a'] must be an object"),
        ({"dynamic": {"-:(": {}}}, "broken pattern"),
        ({"dynamic": {"a": {"bits": 3}}}, "dynamic: a: bits=3 must be 4 or 8"),
        ({"dynamic": {"a": {"bit": 8}}}, "does not read bit"),
        ({"modules_in_block_to_quantize": "mlp"}, "must be a list of names, or of lists"),
        ({"modules_in_block_to_quantize": 3}, "must be a list of names, or of lists"),
        ({"modules_in_block_to_quantize": [[1]]}, "must be a list of names, or of lists"),
        ({"codebook": True}, "codebook"),
    ],
)
def test_what_is_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"rotation": None, "adapter": None, "meta": None}, {}),
        (gptqmodel.NOTES_OF_5, {}),
        ({"desc_act": True, "sym": False}, {"act_order": True, "symmetric": False}),
        ({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}, {"zeros_less_one": False}),
        (
            {"dynamic": {".*up": {"bits": 8, "smoother": {"type": "mad"}, "fallback": None}}},
            {"bits": 8},
        ),
    ],
)
def test_what_gptqmodel_writes_is_read(changes: Any, expected: dict[str, Any]) -> None:
    found = read_scheme(GptqScheme, {**gptqmodel.GPTQ, **changes})
    layout = Layout(bits=4, group=128, act_order=False, symmetric=True, zeros_less_one=True)
    changed = gptq_format(replace(layout, **expected), 256)
    assert found.format_for(UP, (8, 256), "linear") == changed


@pytest.mark.parametrize("key", gptqmodel.CHANGES_NUMBERS)
def test_what_gptqmodel_does_to_products_is_refused(key: str) -> None:
    given = {key: gptqmodel.CHANGES_NUMBERS[key]}
    for changes in (given, {"meta": {**gptqmodel.META, **given}}, {"dynamic": {".*up": given}}):
        with pytest.raises(ConfigError, match=key):
            read_scheme(GptqScheme, {**gptqmodel.GPTQ, **changes})


def test_both_spellings_that_gptqmodel_writes_are_read() -> None:
    scheme(method="gptq", format="gptq", pack_dtype="int32")
    with pytest.raises(ConfigError, match="method='awq' disagrees with quant_method='gptq'"):
        scheme(method="awq")


def test_how_it_was_made_is_harmless() -> None:
    scheme(
        meta={"quantizer": ["gptqmodel:2.0"]},
        true_sequential=True,
        damp_percent=0.1,
        static_groups=False,
        backend="auto",
        use_exllama=True,
        act_group_aware=True,
        format="gptq",
        adapter=None,
    )
