"""Rounding to FP8 with one scale for each row and 128 columns, and the sum over a token's experts.

A scale is the largest magnitude / 448, the largest e4m3 value; a group of zeros has scale 1, one
with a NaN has NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackmount_registry.formats import BLOCK

LARGEST = tl.constexpr(448.0)
GROUP = tl.constexpr(BLOCK)


@triton.jit
def round_kernel(
    x,
    rows,
    values,
    scales,
    x_stride,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
):
    """One row: of x, or silu(first half) * second half of it. `rows`, where it is not None, names
    the row of x; below 0 stands a row of zeros."""
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if rows is not None:
        row = tl.load(rows + out_row).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < COLUMNS
    at = x + row * x_stride + column
    wide = tl.load(at, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(at + COLUMNS, mask=inside & (row >= 0), other=0.0)
        wide = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
    # Bits of floats above 0 are ordered as the floats are, with NaN beyond infinity: `tl.max` of
    # floats would drop it.
    bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    scaled = tl.clamp(wide / scale[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = scaled.to(values.dtype.element_ty)
    tl.store(values + out_row * COLUMNS + column, rounded, mask=inside)
    group = tl.arange(0, GROUPS)
    tl.store(scales + out_row * (COLUMNS // GROUP) + group, scale, mask=group < COLUMNS // GROUP)


def round_groups(
    x: Tensor, rows: Tensor | None = None, *, silu_mul: bool = False
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [R, N] and scales float32 [R, N / 128] of x [R, N], of its rows `rows` int32 [R],
    or of silu(gate) * up where x is [R, 2 N], rounded to the dtype of x first."""
    columns = x.shape[1] // 2 if silu_mul else x.shape[1]
    assert columns % BLOCK == 0 and x.stride(1) == 1
    count = len(x) if rows is None else len(rows)
    values = torch.empty(count, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, columns // BLOCK, dtype=torch.float32, device=x.device)
    if count:
        round_kernel[(count,)](
            x, rows, values, scales, x.stride(0), COLUMNS=columns,
            GROUPS=triton.next_power_of_2(columns // BLOCK), SILU=silu_mul, num_warps=4,
        )  # fmt: skip
    return values, scales


@triton.jit
def sum_kernel(
    y, rows, weights, out, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k)
        taken = (row >= 0) & (column < COLUMNS)
        part = tl.load(y + row * COLUMNS + column, mask=taken, other=0.0)
        total += tl.where(row >= 0, weight, 0.0) * part.to(tl.float32)
    tl.store(out + token * COLUMNS + column, total.to(out.dtype.element_ty), mask=column < COLUMNS)


def sum_experts(y: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """y [R, H], rows int32 [T, K] (below 0: none), weights float32 [T, K] -> the weighted sums
    [T, H], added by rising k in float32."""
    tokens, top_k = rows.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    block_n = min(1024, triton.next_power_of_2(y.shape[1]))
    sum_kernel[(tokens, triton.cdiv(y.shape[1], block_n))](
        y, rows, weights, out, TOP_K=top_k, COLUMNS=y.shape[1], BLOCK_N=block_n, num_warps=4
    )
    return out
