"""Small passes around products: the activation after one of many rows, columns in stored order."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_registry.device.launch import launch_options

BLOCK = 1024


@triton.jit
def silu_mul_kernel(both, out, both_stride, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate = tl.load(both + row * both_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + N + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * N + columns, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(both: Tensor) -> Tensor:
    """silu(first half) * second half of the columns: [T, 2 n] -> [T, n]."""
    rows, n = len(both), both.shape[1] // 2
    out = torch.empty((rows, n), dtype=both.dtype, device=both.device)
    if rows > 0:
        silu_mul_kernel[(rows, triton.cdiv(n, BLOCK))](
            both, out, both.stride(0), n, BLOCK=BLOCK, num_warps=4, **launch_options(both.device)
        )
    return out


@triton.jit
def gather_kernel(x, order, out, x_stride, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    source = tl.load(order + columns, mask=inside, other=-1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + row * x_stride + source, mask=source >= 0, other=0.0)
    tl.store(out + row * K + columns, values, mask=inside)


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """x [T, in], order int32 [k] -> x[:, order] [T, k], 0 where the order says -1."""
    rows, k = len(x), len(order)
    out = torch.empty((rows, k), dtype=x.dtype, device=x.device)
    if rows > 0:
        gather_kernel[(rows, triton.cdiv(k, BLOCK))](
            x, order, out, x.stride(0), k, BLOCK=BLOCK, num_warps=4, **launch_options(x.device)
        )
    return out
