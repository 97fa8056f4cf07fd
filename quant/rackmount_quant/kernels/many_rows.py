"""Weights become 16-bit matrices in memory: what a product of many rows multiplies with."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_quant.kernels.packed import Packed
from rackmount_registry.device.launch import launch_options
from rackmount_registry.device.unpack import unpack_fp8, unpack_int4, unpack_int8

BLOCK_N = 32


@triton.jit
def dequantize_kernel(
    words,
    scales,
    zeros,
    out,
    N,
    K,
    row_stride,
    block_stride,
    scale_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Words as `few_rows_kernel` reads them -> out [N, K]. GROUP: columns that share a
    scale; 0: all."""
    W: tl.constexpr = BLOCK_K // 8 if FORMAT == "int4" else BLOCK_K // 4
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    j = tl.arange(0, W)
    mask = (rows[:, None] < N) & (columns[None, :] < K)
    at = words + block.to(tl.int64) * block_stride + rows.to(tl.int64)[:, None] * row_stride
    # From the first column of 16 bytes to that of the next.
    PIECE: tl.constexpr = 8 if FORMAT == "int4" else 4 * BLOCK_K // W
    inside = (rows[:, None] < N) & (block * BLOCK_K + j[None, :] // 4 * PIECE < K)
    packed = tl.load(at + j[None, :], mask=inside, other=0)
    dtype: tl.constexpr = out.dtype.element_ty
    if FORMAT == "int4":
        values = unpack_int4(packed, None, dtype, COMPILED, BLOCK_K // 32)
    elif FORMAT == "int8":
        values = unpack_int8(packed, None, dtype, COMPILED)
    else:
        values = unpack_fp8(packed, dtype, COMPILED)
    values = values.to(tl.float32)
    place = rows[:, None] // ROWS_PER_SCALE * scale_stride
    if GROUP > 0 and GROUP % BLOCK_K == 0:
        place += block // (GROUP // BLOCK_K)
    elif GROUP > 0:
        place = place + (tl.minimum(columns, K - 1) // GROUP)[None, :]
    if zeros is not None:
        zero = tl.load(zeros + place, mask=rows[:, None] < N, other=0).to(tl.float32)
        values -= zero - 8.0 if FORMAT == "int4" else zero
    scale = tl.load(scales + place, mask=rows[:, None] < N, other=0.0).to(tl.float32)
    values = (values * scale).to(dtype)
    if PDL:
        # Weights are written by no kernel, but `out` may be what the one before still reads.
        gdc_wait()
        gdc_launch_dependents()
    tl.store(out + rows.to(tl.int64)[:, None] * K + columns[None, :], values, mask=mask)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [n, k], its columns as they are stored, rounded to `dtype`, which is bfloat16 or
    float16."""
    out = torch.empty((packed.n, packed.k), dtype=dtype, device=packed.words.device)
    arguments = arguments_of(packed, out)
    grid = triton.cdiv(packed.k, arguments["BLOCK_K"]), triton.cdiv(packed.n, BLOCK_N)
    dequantize_kernel[grid](**arguments)
    return out


def arguments_of(packed: Packed, out: Tensor) -> dict[str, Any]:
    """The kernel's."""
    block_k = packed.panel or 128
    row_stride, block_stride = packed.strides(block_k)
    return {
        "words": packed.words,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "out": out,
        "N": packed.n,
        "K": packed.k,
        "row_stride": row_stride,
        "block_stride": block_stride,
        "scale_stride": packed.scales.stride(0),
        "FORMAT": packed.format,
        "GROUP": packed.group,
        "ROWS_PER_SCALE": packed.rows_per_scale,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": block_k,
        "COMPILED": out.device.type == "cuda",
        **launch_options(out.device),
    }
