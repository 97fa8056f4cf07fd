"""Inputs of products, rounded to eight bits: in a pass of their own, or in that of the norm or of
the activation which makes them.

Scales are dynamic, one for each token (its largest magnitude / 448, or / 127 for integers) or for
each token and 128 columns, or one is given. Values saturate, but for NaN: it makes the scale NaN,
or is the value where the scale is given and values can be NaN. They stand in the order in which the
weight's words hold columns (`rackmount_registry.device.unpack.interleave`): a product is the same
when both operands are permuted alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_registry.device.launch import launch_options
from rackmount_registry.formats import BLOCK, Activation, Rounded

LARGEST: Mapping[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
LANES = 32


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """Of float32 along an axis (None: of all); NaN where any is, which `tl.max` of floats drops."""
    # Bits of floats above 0 are ordered as the floats are, with NaN beyond infinity.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def round_kernel(
    x,
    other,
    weight,
    given,
    total,
    values,
    scales,
    x_stride,
    other_stride,
    scale_stride,
    eps,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,
    MAKE: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a row: x [T, N] -> values [T, PADDED] and scales.

    MAKE says of what: "input": x itself; "norm": its RMS norm times `weight`, after `other` was
    added where it is not None, and the sum written to `total`; "silu_mul": silu(x) * other.
    `scales`: [T], or [columns / 128, T] with PER "group"; with "tensor" all are the given one.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    if MAKE == "norm":
        gains = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    read = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    wide = read.to(tl.float32)
    if MAKE == "norm":
        if other is not None:
            added = tl.load(other + row * other_stride + columns, mask=inside, other=0.0)
            read = (wide + added.to(tl.float32)).to(read.dtype)
            tl.store(total + row * N + columns, read, mask=inside)
            wide = read.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide) / N + eps)
        wide = (normed.to(read.dtype).to(tl.float32) * gains).to(read.dtype).to(tl.float32)
    if MAKE == "silu_mul":
        up = tl.load(other + row * other_stride + columns, mask=inside, other=0.0).to(tl.float32)
        wide = (wide / (1.0 + tl.exp(-wide)) * up).to(read.dtype).to(tl.float32)
    # Columns as [sub-block of 16][i][t][h], see `unpack`, become [sub-block][t][h][i].
    if PER == "group":
        groups = wide.reshape(BLOCK // 128, 128)
        largest = largest_magnitude(groups, 1)
        scale = tl.where(largest == 0, 1.0, largest / LARGEST)
        g = tl.arange(0, BLOCK // 128)
        tl.store(scales + g * scale_stride + row, scale, mask=g * 128 < N)
        wide = (groups / scale[:, None]).reshape(BLOCK)
    elif PER == "token":
        largest = largest_magnitude(wide, None)
        scale = tl.where(largest == 0, 1.0, largest / LARGEST)
        tl.store(scales + row, scale)
        wide = wide / scale
    else:
        scale = tl.load(given)
        if values.dtype.element_ty == tl.int8:  # which has no NaN of its own
            largest = largest_magnitude(wide, None)
            scale = tl.where(largest == largest, scale, largest)
        tl.store(scales + row, scale)
        wide = wide / scale
    if values.dtype.element_ty == tl.int8:
        wide = tl.clamp(wide, -LARGEST, LARGEST)
    else:
        wide = tl.clamp(wide, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    ordered = wide.reshape(BLOCK // 16, 2, 8).permute(0, 2, 1).reshape(BLOCK)
    if values.dtype.element_ty == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits behind the point: it rounds to nearest, ties to even.
        ordered = (ordered + 12582912.0) - 12582912.0
    tl.store(
        values + row * PADDED + columns,
        ordered.to(values.dtype.element_ty),
        mask=columns < PADDED,
    )


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How a weight's products round their input."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    per: Activation
    """"token", "tensor" or "group"."""
    given: Tensor | None = None
    """float32 [1]: the static scale of "tensor"."""
    rows_by: int = 16
    """Rows that products take at a time: there are more, of anything, up to a multiple."""

    def empty(self, x: Tensor) -> "RoundedRows":
        """Room for x [T, in]."""
        rows, n = x.shape
        most, groups = rows + -rows % self.rows_by, -(-n // BLOCK) if self.per == "group" else 1
        values = torch.empty((most, n + -n % 16), dtype=self.dtype, device=x.device)
        scales = torch.empty((groups, most), dtype=torch.float32, device=x.device)
        return RoundedRows(values, scales.t(), x.dtype, rows)

    def round(self, x: Tensor) -> "RoundedRows":
        """x [T, in] as it is."""
        return self._launch("input", x, None, None, None, 0.0)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple["RoundedRows", Tensor]:
        """See `LinearKernel.round_norm`."""
        total = (
            x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        return self._launch("norm", x, residual, weight, total, eps), total

    def round_silu_mul(self, gate: Tensor, up: Tensor) -> "RoundedRows":
        """See `LinearKernel.round_silu_mul`."""
        return self._launch("silu_mul", gate, up, None, None, 0.0)

    def _launch(
        self,
        make: str,
        x: Tensor,
        other: Tensor | None,
        weight: Tensor | None,
        total: Tensor | None,
        eps: float,
    ) -> "RoundedRows":
        assert x.stride(-1) == 1 and (other is None or other.stride(-1) == 1)
        rounded, (rows, n) = self.empty(x), x.shape
        block = max(BLOCK, triton.next_power_of_2(n))
        if rows > 0:
            round_kernel[(rows,)](
                x,
                other,
                weight,
                self.given,
                total,
                rounded.values,
                rounded.scales,
                x.stride(0),
                other.stride(0) if other is not None else 0,
                rounded.scales.stride(1),
                eps,
                N=n,
                PADDED=rounded.values.shape[1],
                BLOCK=block,
                PER=self.per,
                MAKE=make,
                LARGEST=LARGEST[self.dtype],
                num_warps=max(1, min(16, block // (16 * LANES))),
                **launch_options(x.device),
            )
        return rounded


@dataclass(frozen=True)
class RoundedRows(Rounded):
    """Values [T or more, in rounded up to 16] in the order of the weight's words; scales [T or
    more, 1], or of 128 columns each [T or more, groups], columns contiguous."""

    dtype: torch.dtype
    """Of what was rounded, and of the product."""
    num_rows: int
    """T."""

    def __len__(self) -> int:
        return self.num_rows
