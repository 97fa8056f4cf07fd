"""Rounding of plain weights to nearest: what `encode` and online quantization share.

Scales follow compressed-tensors' min-max rule. A symmetric one of integers is the largest
magnitude / 7.5 or / 127.5, so that the most negative value is used and the largest positive one
may be clamped; an asymmetric one spans from the least to the largest value, 0 included. Of zeros
alone the scale is 1.
"""

from typing import Literal

import torch
from torch import Tensor

from rackmount_quant.packing import midpoint

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
CHUNK = 2**24
"""Values in float32 at a time where a weight is rounded."""


def round_groups(
    dense: Tensor, bits: int, group: int, *, symmetric: bool = True, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row of [out, in] by groups of columns, the last of which may be short.

    Returns:
        uint8 values [out, in] from 0 on, scales [out, G] in `dtype`, uint8 zero points [out, G];
        a value stands for (value - zero point) * scale.
    """
    out, size = dense.shape
    padded = torch.nn.functional.pad(dense.float(), (0, -size % group)).view(out, -1, group)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    steps, zeros = 2**bits - 1, torch.full_like(low, midpoint(bits))
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = stored_scales(span / steps, dtype)
    if not symmetric:
        zeros = (-low / scales.float()).round().clamp(0, steps)
    scaled = padded / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)
    values = scaled.round().clamp(0, steps).to(torch.uint8).view(out, -1)[:, :size]
    return values, scales, zeros.to(torch.uint8)


def round_int8(dense: Tensor, per: Literal["tensor", "channel"]) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and scales float32, [out] or [1]."""
    scales = stored_scales(_largest(dense, per) / 127.5, torch.float32)
    values = (dense.float() / scales.unsqueeze(-1)).round().clamp(-128, 127)
    return values.to(torch.int8), scales


def round_e4m3(dense: Tensor, per: Literal["tensor", "channel"]) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [..., out, in] and scales float32, [..., out], or [1] for all of it."""
    scales = stored_scales(_largest(dense, per) / E4M3_MAX, torch.float32)
    values = torch.empty(dense.shape, dtype=E4M3, device=dense.device)
    rows, columns = dense.numel() // max(1, dense.shape[-1]), dense.shape[-1]
    divisors = scales.expand(dense.shape[:-1]).reshape(rows, 1)
    at_once = max(1, CHUNK // max(1, columns))
    for source, target, divisor in zip(
        dense.reshape(rows, columns).split(at_once),
        values.view(rows, columns).split(at_once),
        divisors.split(at_once),
        strict=True,
    ):
        target.copy_(saturated(source.float() / divisor))
    return values, scales


def round_blocks(dense: Tensor, block: int, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [out, in] and scales float32 [ceil(out / block), ceil(in / block)]."""
    out, size = dense.shape
    padded = torch.nn.functional.pad(dense.float(), (0, -size % block, 0, -out % block))
    blocks = padded.view(-1, block, padded.shape[1] // block, block)
    scales = stored_scales(blocks.abs().amax((1, 3)) / E4M3_MAX, torch.float32)
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    values = saturated(blocks / scales[:, None, :, None]).view(padded.shape)[:out, :size]
    return values.contiguous(), scales


def saturated(scaled: Tensor) -> Tensor:
    """To float8_e4m3fn, which has no infinity."""
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """In the type of the checkpoint, none of them 0: of zeros alone it is 1."""
    least = torch.finfo(dtype).smallest_normal
    return scales.where(scales == 0, scales.clamp(min=least)).where(scales != 0, 1).to(dtype)


def _largest(dense: Tensor, per: Literal["tensor", "channel"]) -> Tensor:
    """Largest magnitude, float32, of each row or of all."""
    rows = torch.maximum(dense.amax(-1), -dense.amin(-1)).float()
    return rows if per == "channel" else rows.amax().view(1)
