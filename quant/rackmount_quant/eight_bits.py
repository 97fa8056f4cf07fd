"""Stored formats of weights with eight bits a value: FP8 by tensor, channel and block, and INT8."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rackmount_quant.rounding import round_blocks, round_e4m3, round_int8
from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import BLOCK, Activation, Dim, Slot, StoredFormat, Weight
from rackmount_registry.scales import check_scales

Per = Literal["tensor", "channel"]
Round = Callable[[Tensor, Per], tuple[Tensor, Tensor]]

MATRIX = (Dim("out"), Dim("in"))
SCALES: Mapping[Per, tuple[Dim, ...]] = {"tensor": (Dim("part"),), "channel": (Dim("out"),)}


def fp8_rows(
    per: Per,
    activation: Activation,
    *,
    scale: str = "weight_scale",
    input_scale: str = "input_scale",
    ignored: tuple[Slot, ...] = (),
) -> StoredFormat:
    """float8_e4m3fn with a scale for each tensor or row, by which values are multiplied.

    Args:
        activation: with "tensor" there is a static `input_scale` as well.
        scale, input_scale: their suffixes.
        ignored: further tensors of a checkpoint that say how inputs are rounded, where inputs stay
            as they are.
    """
    return _rows("fp8", "float8_e4m3fn", round_e4m3, per, activation, scale, input_scale, ignored)


def int8_rows(per: Per, activation: Activation, *, ignored: tuple[Slot, ...] = ()) -> StoredFormat:
    """int8, symmetric, with a scale for each tensor or row; the rest as `fp8_rows`."""
    return _rows(
        "int8", "int8", round_int8, per, activation, "weight_scale", "input_scale", ignored
    )


def _rows(
    kind: str,
    dtype: str,
    rounding: Round,
    per: Per,
    activation: Activation,
    scale: str,
    input_scale: str,
    ignored: tuple[Slot, ...],
) -> StoredFormat:
    static = (Slot(input_scale, (Dim("part"),), "float32"),) if activation == "tensor" else ()
    return StoredFormat(
        f"{kind} by {per}, inputs {activation}",
        (
            Slot("weight", MATRIX, dtype),
            Slot(scale, SCALES[per], "float32"),
            *static,
            *ignored,
        ),
        f"{kind}_rows",
        partial(_finish_rows, f"{kind}_rows", per, activation, scale, input_scale),
        partial(_encode_rows, rounding, per, scale, (*static, *ignored)),
    )


def _finish_rows(
    form: str,
    per: Per,
    activation: Activation,
    scale: str,
    input_scale: str,
    tensors: Mapping[str, Tensor],
    parts: tuple[int, ...],
    in_features: int,
) -> Weight:
    scales = check_scales(tensors[scale], scale)
    if per == "tensor":  # parts with scales of their own stay exact as rows
        sizes = torch.tensor(parts, device=scales.device)
        scales = scales.repeat_interleave(sizes, -1, output_size=sum(parts))
    named = {"values": _numbers(tensors["weight"]), "scales": scales}
    if activation == "tensor":
        is_bundle = tensors["weight"].dim() == 3
        named["input_scale"] = _largest(tensors[input_scale], input_scale, is_bundle)
    return Weight(form, named, parts, in_features, activation=activation)


def _largest(scales: Tensor, what: str, is_bundle: bool) -> Tensor:
    """float32 [1], the input scale for all parts and experts: no input is clamped that was not
    before. Calibration gives an expert that no token reached 0 or NaN; such are passed over."""
    if not is_bundle:
        return check_scales(scales, what).amax().view(1)
    if others := int((torch.isinf(scales) | (scales < 0)).sum()):
        raise CheckpointError(
            f"{what} must be finite and not negative, and {others} of {scales.numel()} are not"
        )
    largest = scales.where(torch.isfinite(scales) & (scales > 0), 0).amax().view(1)
    return check_scales(largest, f"the largest {what} of all experts here")


def _numbers(values: Tensor) -> Tensor:
    """`values` as they are; CheckpointError where one is not a number, which kernels that unpack by
    bits would take for 480."""
    if values.dtype == torch.float8_e4m3fn:
        count = int(((values.view(torch.uint8) & 0x7F) == 0x7F).sum())
        if count:
            raise CheckpointError(f"weight has {count} values that are not numbers")
    return values


def _encode_rows(
    rounding: Round, per: Per, scale: str, inputs: tuple[Slot, ...], dense: Tensor
) -> dict[str, Tensor]:
    values, scales = rounding(dense, per)
    return {"weight": values, scale: scales} | unit_inputs(inputs, dense)


def unit_inputs(slots: tuple[Slot, ...], dense: Tensor) -> dict[str, Tensor]:
    """Stand-ins for what a weight alone does not tell: input scales of 1, zero points of 0."""
    return {
        slot.suffix: torch.full((1,), float(slot.dtype == "float32"), device=dense.device)
        for slot in slots
    }


def fp8_blocks(
    activation: Activation,
    *,
    scale: str = "weight_scale",
    power_of_two: bool = False,
    ignored: tuple[Slot, ...] = (),
) -> StoredFormat:
    """float8_e4m3fn with a scale for each block of 128 x 128, by which values are multiplied.

    `power_of_two` is what `encode` gives scales for "ue8m0"; such are read as any others.
    """
    return StoredFormat(
        f"fp8 by block, inputs {activation}",
        (
            Slot("weight", MATRIX, "float8_e4m3fn"),
            Slot(scale, (Dim("out", BLOCK), Dim("in", BLOCK)), "float32"),
            *ignored,
        ),
        "fp8_blocks",
        partial(_finish_blocks, activation, scale),
        partial(_encode_blocks, scale, power_of_two, ignored),
    )


def _finish_blocks(
    activation: Activation,
    scale: str,
    tensors: Mapping[str, Tensor],
    parts: tuple[int, ...],
    in_features: int,
) -> Weight:
    values = _numbers(tensors["weight"])
    named = {"values": values, "scales": check_scales(tensors[scale], scale)}
    return Weight("fp8_blocks", named, parts, in_features, activation=activation)


def _encode_blocks(
    scale: str, power_of_two: bool, ignored: tuple[Slot, ...], dense: Tensor
) -> dict[str, Tensor]:
    values, scales = round_blocks(dense, BLOCK, power_of_two=power_of_two)
    return {"weight": values, scale: scales} | unit_inputs(ignored, dense)


def _finish_online(
    tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int
) -> Weight:
    values, scales = round_e4m3(tensors["weight"], "channel")
    named = {"values": values, "scales": check_scales(scales, "the scales that weight gets")}
    return Weight("fp8_rows", named, parts, in_features, activation="token")


FP8_ONLINE = StoredFormat(
    "plain, rounded to fp8 by channel",
    (Slot("weight", MATRIX),),
    "fp8_rows",
    _finish_online,
    lambda dense: {"weight": dense},
    held_bytes=lambda rows, columns: rows * (columns + torch.float32.itemsize),
)
"""A plain weight, rounded once it is loaded."""
