"""The scheme fp8: three spellings of stored weights, and plain ones rounded as they are loaded."""

import math
import re
from typing import Any

import pytest
import torch
from tests.helpers.schemes import load, load_bundle, read_scheme
from torch import Tensor

from rackmount_quant.fp8 import Fp8Scheme
from rackmount_quant.rounding import round_blocks, round_e4m3
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.formats import KVCacheScheme, StoredFormat

E4M3 = torch.float8_e4m3fn
BLOCK = {"weight_block_size": [128, 128]}
UP = "model.layers.0.mlp.up_proj"


def scheme(**changes: Any) -> Fp8Scheme:
    return read_scheme(Fp8Scheme, {"quant_method": "fp8", "activation_scheme": "dynamic"} | changes)


def stored_as(**changes: Any) -> StoredFormat:
    stored = scheme(**changes).format_for(UP, (8, 8), "linear")
    assert stored is not None
    return stored


def random_values(*shape: int, seed: int = 0) -> Tensor:
    """Every finite value of e4m3 may come."""
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(127, shape, generator=random)
    bits += 128 * torch.randint(2, shape, generator=random)
    return bits.to(torch.uint8).view(E4M3)


@pytest.mark.parametrize(
    ("changes", "scale", "input_scale"),
    [
        ({}, "weight_scale", "input_scale"),
        ({"weight_block_size": None}, "weight_scale_inv", "activation_scale"),
    ],
)
@pytest.mark.parametrize("static", [True, False])
def test_parts_with_scales_of_their_own_stay_exact(
    changes: dict[str, Any], scale: str, input_scale: str, static: bool
) -> None:
    stored = stored_as(activation_scheme="static" if static else "dynamic", **changes)
    parts, scales = (5, 3, 2), (0.25, 0.1, 3.0)
    values = [random_values(part, 7, seed=part) for part in parts]
    packed = [{"weight": v, scale: torch.tensor(s)} for v, s in zip(values, scales, strict=True)]
    if static:
        for each, given in zip(packed, (0.5, 0.75, 0.25), strict=True):
            each[input_scale] = torch.tensor([given])
    finished = load(stored, packed, parts, 7)
    assert finished.format == "fp8_rows"
    assert finished.activation == ("tensor" if static else "token")
    for index, (value, factor) in enumerate(zip(values, scales, strict=True)):
        assert torch.equal(finished.dequantize(index), value.float() * torch.tensor(factor))
    if static:
        assert finished.tensors["input_scale"].tolist() == [0.75]


def test_experts_share_the_largest_input_scale_and_keep_their_own_weight_scales() -> None:
    stored = stored_as(activation_scheme="static")
    experts = [
        [
            {
                "weight": random_values(4, 6, seed=10 * e + part),
                "weight_scale": torch.tensor([0.5 + e + 0.1 * part]),
                "input_scale": torch.tensor([0.1 * (1 + e + part)]),
            }
            for part in range(2)
        ]
        for e in range(3)
    ]
    bundle = load_bundle(stored, experts, (4, 4), 6)
    assert bundle.tensors["input_scale"].tolist() == [pytest.approx(0.4)]
    for e, expert in enumerate(experts):
        dense = torch.cat([part["weight"].float() * part["weight_scale"] for part in expert])
        assert torch.equal(bundle.expert(e).dequantize(), dense)


@pytest.mark.parametrize(
    ("given", "largest"),
    [((0.0, 0.25, 0.5), 0.5), ((0.5, math.nan, 0.25), 0.5), ((0.0, math.nan, 0.0), None)],
)
def test_experts_that_calibration_never_reached_are_passed_over(
    given: tuple[float, ...], largest: float | None
) -> None:
    stored = stored_as(activation_scheme="static")
    experts = [
        [
            {
                "weight": random_values(4, 6, seed=e),
                "weight_scale": torch.tensor([0.5]),
                "input_scale": torch.tensor([scale]),
            }
        ]
        for e, scale in enumerate(given)
    ]
    if largest is None:
        with pytest.raises(
            CheckpointError, match="largest input_scale of all experts here must be"
        ):
            load_bundle(stored, experts, (4,), 6)
    else:
        bundle = load_bundle(stored, experts, (4,), 6)
        assert bundle.tensors["input_scale"].tolist() == [largest]


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, -0.25])
def test_an_expert_s_input_scale_that_no_calibration_gives_is_refused(wrong: float) -> None:
    values = {"weight": random_values(4, 6, seed=1), "weight_scale": torch.tensor([0.5])}
    experts = [[values | {"input_scale": torch.tensor([scale])}] for scale in (0.5, wrong)]
    with pytest.raises(CheckpointError, match="input_scale must be finite and not negative, and 1"):
        load_bundle(stored_as(activation_scheme="static"), experts, (4,), 6)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(("parts", "size"), [((256,), 128), ((100, 130), 300), ((1, 128, 5), 1)])
def test_blocks_are_multiplied_by_what_is_called_an_inverse(
    parts: tuple[int, ...], size: int, scale_dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(1)
    packed, dense = [], []
    for part in parts:
        values = random_values(part, size, seed=part)
        shape = (-(-part // 128), -(-size // 128))
        scales = (torch.rand(shape, generator=random) + 0.1).to(scale_dtype)
        packed.append({"weight": values, "weight_scale_inv": scales})
        whole = values.float().clone()
        for row in range(shape[0]):
            for column in range(shape[1]):
                block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                whole[block] *= scales.float()[row, column]
        dense.append(whole)
    finished = load(stored_as(**BLOCK, scale_fmt="ue8m0"), packed, parts, size)
    assert (finished.format, finished.activation) == ("fp8_blocks", "group")
    for index, whole in enumerate(dense):
        assert torch.equal(finished.dequantize(index), whole)


@pytest.mark.parametrize(
    "changes", [{}, {"activation_scheme": "static"}, BLOCK, BLOCK | {"scale_fmt": "ue8m0"}]
)
def test_what_is_encoded_is_rounded_and_no_more(changes: dict[str, Any]) -> None:
    dense = torch.randn(130, 140, generator=torch.Generator().manual_seed(0))
    stored = stored_as(**changes)
    assert stored.encode is not None
    finished = load(stored, [stored.encode(dense)], (130,), 140)
    if "weight_block_size" in changes:
        values, scales = round_blocks(dense, 128, power_of_two="scale_fmt" in changes)
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :140]
    else:
        values, scales = round_e4m3(dense, "tensor")
    assert torch.equal(finished.dequantize(), values.float() * scales)


def test_plain_weights_are_rounded_by_rows_once_they_are_loaded() -> None:
    chosen = Fp8Scheme(None)
    stored = chosen.format_for(UP, (8, 8), "linear")
    assert stored is not None and stored.yields == "fp8_rows" and chosen.kv_cache is None
    assert chosen.format_for("model.layers.0.mlp.gate", (8, 8), "router") is None
    assert chosen.format_for("lm_head", (8, 8), "head") is None
    dense = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    dense[1, 3] = 0
    finished = stored.finish({"weight": dense}, (2, 4), 20)
    assert finished.activation == "token" and finished.tensors["values"].dtype == E4M3
    scales = dense.float().abs().amax(-1) / 448
    expected = (dense.float() / scales.where(scales > 0, 1).unsqueeze(-1)).to(E4M3)
    assert torch.equal(finished.tensors["values"].float(), expected.float())
    assert torch.equal(
        finished.dequantize(), expected.float() * finished.tensors["scales"].unsqueeze(-1)
    )
    assert finished.tensors["scales"][1, 3] == 1
    assert stored.encode is not None and stored.encode(dense)["weight"] is dense


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_what_is_named_is_plain(key: str) -> None:
    chosen = scheme(**{key: ["lm_head", "model.layers.0.mlp.gate_up_proj", "re:.*v_proj"]})
    assert chosen.format_for(UP, (8, 8), "linear") is None
    assert chosen.format_for("model.layers.1.self_attn.v_proj", (8, 8), "linear") is None
    assert chosen.format_for("model.layers.1.mlp.up_proj", (8, 8), "linear") is not None
    assert chosen.format_for("model.layers.1.mlp.gate", (8, 8), "router") is None


@pytest.mark.parametrize("given", ["static", {"num_bits": 8, "type": "float"}])
def test_the_kv_cache_is_as_the_checkpoint_wants_it(given: Any) -> None:
    assert scheme(kv_cache_scheme=given).kv_cache == KVCacheScheme()
    assert scheme(kv_cache_scheme=None).kv_cache is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "fmt='e5m2' must be 'e4m3'"),
        ({"activation_scheme": "none"}, "activation_scheme='none' must be 'static' or 'dynamic'"),
        ({"weight_block_size": [64, 128]}, "weight_block_size=[64, 128] must be [128, 128]"),
        (BLOCK | {"activation_scheme": "static"}, "must be 'dynamic' where weights have block"),
        ({"scale_fmt": "e4m3"}, "scale_fmt='e4m3' must be 'float' or 'ue8m0'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4' must be 'fp8'"),
        ({"modules_to_convert": ["embed"]}, "modules_to_convert=['embed'] must be"),
        ({"ignored_layers": "lm_head"}, "must be a list of names"),
        ({"kv_cache_scheme": "dynamic"}, "kv_cache_scheme='dynamic' must be an object"),
        ({"weight_scale_dtype": "x"}, "weight_scale_dtype"),
    ],
)
def test_what_is_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(**changes)


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("blocks", [True, False])
def test_scales_that_say_nothing_are_refused(blocks: bool, bad: float) -> None:
    stored = stored_as(**(BLOCK if blocks else {}))
    assert stored.encode is not None
    packed = dict(stored.encode(torch.randn(200, 140)))
    name = "weight_scale_inv" if blocks else "weight_scale"
    packed[name].view(-1)[-1] = bad
    with pytest.raises(CheckpointError, match=f"{name} must be finite and above 0"):
        load(stored, [packed], (200,), 140)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_weight_that_is_no_number_is_refused(blocks: bool) -> None:
    stored = stored_as(**(BLOCK if blocks else {}))
    assert stored.encode is not None
    packed = dict(stored.encode(torch.randn(200, 140)))
    packed["weight"].view(torch.uint8)[7, 5] = 0xFF
    with pytest.raises(CheckpointError, match="weight has 1 values that are not numbers"):
        load(stored, [packed], (200,), 140)
