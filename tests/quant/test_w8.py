"""The scheme w8: what it stores, what it leaves dense, and how far rounding goes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackmount_quant.w8 import INT8_ROWS, W8Scheme, quantize_rows
from rackmount_registry.config import ConfigReader
from rackmount_registry.errors import ConfigError

LAYER = "model.layers.11"
PARTS = [
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
]


def scheme(*ignore: str, **more: Any) -> W8Scheme:
    values = {"quant_method": "w8", "ignore": list(ignore), **more}
    return W8Scheme(ConfigReader(values, "config.json: quantization_config", frozenset()))


def left_dense(*ignore: str, layer: str = LAYER) -> list[str]:
    chosen = scheme(*ignore)
    return [p for p in PARTS if chosen.format_for(f"{layer}.{p}", (8, 8), "linear") is None]


def test_without_ignore_everything_but_routers_and_heads_is_quantized() -> None:
    chosen = W8Scheme(ConfigReader({"quant_method": "w8"}, harmless=frozenset()))
    assert chosen.format_for(f"{LAYER}.mlp.up_proj", (8, 4), "linear") is INT8_ROWS
    assert chosen.format_for(f"{LAYER}.mlp.experts.3.up_proj", (8, 4), "expert") is INT8_ROWS
    assert chosen.format_for(f"{LAYER}.mlp.gate", (8, 4), "router") is None
    assert chosen.format_for("lm_head", (8, 4), "head") is None


@pytest.mark.parametrize(
    ("ignore", "dense"),
    [
        ((f"{LAYER}.self_attn.q_proj",), ["self_attn.q_proj"]),
        ((f"{LAYER}.self_attn.qkv_proj",), PARTS[:3]),
        ((f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"), PARTS[4:6]),
        (("gate_up_proj",), PARTS[4:6]),
        (("mlp.down_proj", "o_proj"), ["self_attn.o_proj", "mlp.down_proj"]),
        ((r"re:.*\.(q|k)_proj$",), PARTS[:2]),
        ((r"re:model\.layers\.11\.mlp",), PARTS[4:]),
        (("re:.*v_proj",), PARTS[2:3]),
        (("proj", "_proj", "layers.1", "model.layers.1.mlp.up_proj", "re:mlp"), []),
    ],
)
def test_ignored_names_stay_dense(ignore: tuple[str, ...], dense: list[str]) -> None:
    assert left_dense(*ignore) == dense


def test_a_name_of_one_layer_leaves_the_others() -> None:
    assert left_dense(f"{LAYER}.mlp.gate_up_proj", layer="model.layers.1") == []
    assert left_dense("model.layers.1.mlp.gate_up_proj") == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "bits"),
        ({"ignore": "q_proj"}, "ignore='q_proj' must be a list of names"),
        ({"ignore": [3]}, "must be a list of names"),
        ({"ignore": ["re:("]}, "broken regular expression"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        scheme(**config)


def test_what_is_stored_becomes_the_named_format_where_it_lies() -> None:
    values, scales = quantize_rows(torch.randn(3, 6, 4))
    weight = INT8_ROWS.finish({"weight": values, "weight_scale": scales}, (4, 2), 4)
    assert weight.format == INT8_ROWS.yields
    assert weight.tensors["values"] is values and weight.tensors["scales"] is scales
    assert weight.dequantize(1).shape == (3, 2, 4)
    stored = {slot.suffix: (slot.dtype, len(slot.dims)) for slot in INT8_ROWS.slots}
    assert stored == {"weight": ("int8", 2), "weight_scale": ("float32", 1)}


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_every_entry_is_rounded_to_the_nearest_of_255_steps(
    seed: int, exponent: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(4, 7, generator=generator) * 2.0**exponent).to(dtype)
    values, scales = quantize_rows(weight)
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(values.abs().amax(-1), torch.full((4,), 127, dtype=torch.int8))
    error = (values.double() * scales.double().unsqueeze(-1) - weight.double()).abs()
    assert (error <= scales.double().unsqueeze(-1) * (0.5 + 1e-4)).all()


def test_a_row_of_zeros_stays_zero() -> None:
    values, scales = quantize_rows(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert values.tolist() == [[0, 0], [64, -127]]
    assert scales[0] == 1 and scales[1] == pytest.approx(2 / 127)
