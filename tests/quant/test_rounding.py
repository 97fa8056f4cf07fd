"""Rounding to nearest: as near as the steps allow, by the scales of compressed-tensors."""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackmount_quant.rounding import (
    E4M3,
    round_blocks,
    round_e4m3,
    round_groups,
    round_int8,
    stored_scales,
)


def random_weight(out: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.01


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    symmetric=st.booleans(),
    out=st.integers(1, 5),
    size=st.integers(1, 50),
    group=st.sampled_from((4, 16, 32)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    seed=st.integers(0, 99),
)
def test_every_value_is_the_nearest_that_its_group_has(
    bits: int, symmetric: bool, out: int, size: int, group: int, dtype: torch.dtype, seed: int
) -> None:
    weight = random_weight(out, size, seed)
    values, scales, zeros = round_groups(weight, bits, group, symmetric=symmetric, dtype=dtype)
    assert (values.dtype, scales.dtype, zeros.dtype) == (torch.uint8, dtype, torch.uint8)
    assert values.shape == (out, size) and scales.shape == zeros.shape == (out, -(-size // group))
    groups = torch.arange(size) // group
    scale, zero = scales.double()[:, groups], zeros.double()[:, groups]
    levels = (torch.arange(2**bits) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
    nearest = (levels - weight.double().unsqueeze(-1)).abs().amin(-1)
    chosen = ((values.double() - zero) * scale - weight.double()).abs()
    assert (chosen <= nearest + scale * 1e-4).all()


def library(weight: Tensor, low: Tensor, high: Tensor, **args: Any) -> tuple[Tensor, ...]:
    """Values, scales and zero points as compressed-tensors has them."""
    arguments = QuantizationArgs(**args)
    scales, zeros = calculate_qparams(low, high, arguments)
    values = quantize(weight, scales, zeros, arguments, dtype=arguments.pytorch_dtype())
    return values, scales, zeros


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_are_those_of_compressed_tensors(bits: int, symmetric: bool) -> None:
    weight = random_weight(6, 96)
    grouped = weight.view(6, 3, 32)
    theirs = library(
        weight,
        grouped.amin(-1),
        grouped.amax(-1),
        num_bits=bits,
        symmetric=symmetric,
        strategy="group",
        group_size=32,
    )
    values, scales, zeros = round_groups(weight, bits, 32, symmetric=symmetric, dtype=torch.float32)
    middle = 1 << (bits - 1)
    ours = values.int() - middle, scales, zeros.int() - middle
    torch.testing.assert_close(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2].int())
    assert (ours[0] - theirs[0].int()).abs().max() <= 0


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_fp8_and_int8_are_those_of_compressed_tensors(per: Any) -> None:
    weight = random_weight(7, 40)
    low, high = (
        (weight.amin(-1, True), weight.amax(-1, True))
        if per == "channel"
        else (weight.amin(), weight.amax())
    )
    for rounding, kind in ((round_e4m3, "float"), (round_int8, "int")):
        values, scales, _ = library(weight, low, high, num_bits=8, type=kind, strategy=per)
        ours = rounding(weight, per)
        assert torch.equal(ours[1], scales.view(-1))
        assert torch.equal(ours[0].float(), values.float())


def test_blocks_are_those_of_compressed_tensors() -> None:
    weight = random_weight(200, 256)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, 56)).view(2, 128, 2, 128)
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "block"}
    values, scales, _ = library(
        weight, padded.amin((1, 3)), padded.amax((1, 3)), block_structure=[128, 128], **args
    )
    ours = round_blocks(weight, 128)
    assert torch.equal(ours[1], scales) and torch.equal(ours[0].float(), values.float())


@pytest.mark.parametrize("shape", [(1, 1), (130, 5), (3, 300)])
def test_blocks_at_the_edges_may_be_short(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    values, scales = round_blocks(weight, 128)
    assert values.shape == shape and scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert (values.float() * spread - weight).abs().max() <= weight.abs().max() / 16


def test_scales_that_are_powers_of_two_are_large_enough() -> None:
    weight = random_weight(130, 140)
    _, exact = round_blocks(weight, 128)
    values, scales = round_blocks(weight, 128, power_of_two=True)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    assert ((scales >= exact) & (scales < 2 * exact)).all()
    assert torch.equal(scales.to(torch.float8_e8m0fnu).float(), scales)
    assert values.float().isfinite().all()


def test_a_weight_of_any_size_and_leading_dimensions_is_rounded_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random_weight(24, 10).view(2, 12, 10)
    whole = round_e4m3(weight, "channel")
    monkeypatch.setattr("rackmount_quant.rounding.CHUNK", 25)
    chunked = round_e4m3(weight, "channel")
    assert torch.equal(whole[0].float(), chunked[0].float()) and whole[0].shape == (2, 12, 10)
    scaled = (weight / chunked[1].unsqueeze(-1)).to(E4M3)
    assert torch.equal(chunked[0].float(), scaled.float())
    empty = round_e4m3(torch.empty(0, 3), "channel")
    assert empty[0].shape == (0, 3) and empty[1].shape == (0,)


def test_zeros_have_the_scale_one_and_small_ones_a_normal_one() -> None:
    given = torch.tensor([0.0, 1e-30, 0.5])
    assert stored_scales(given, torch.float16).tolist() == [1, 2**-14, 0.5]
    values, scales, zeros = round_groups(torch.zeros(1, 4), 4, 4, symmetric=False, dtype=torch.half)
    assert (values.tolist(), scales.item(), zeros.item()) == ([[0] * 4], 1, 0)
    assert round_e4m3(torch.zeros(2, 3), "channel")[1].tolist() == [1, 1]
