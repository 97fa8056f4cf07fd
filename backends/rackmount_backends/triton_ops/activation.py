"""`silu_mul`: programs over (row, chunk of columns)."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.launch import block_of, warps_for
from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_registry.device.launch import launch_options

MANY_ROWS = 512
"""From here on rows fill the GPU: each thread takes two vectors of either input."""


@triton.jit
def silu_mul_kernel(
    gate,
    up,
    out,
    gate_stride,
    up_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    a = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    product = a / (1.0 + tl.exp(-a)) * b
    tl.store(out + row * N + columns, product.to(out.dtype.element_ty), mask=inside)


def _silu_mul(gate: Tensor, up: Tensor) -> tuple[Tensor, list[Launch]]:
    assert gate.stride(-1) == up.stride(-1) == 1 and gate.dtype == up.dtype
    rows, size = gate.shape
    out = torch.empty((rows, size), dtype=gate.dtype, device=gate.device)
    many = rows >= MANY_ROWS
    block = block_of(size, most=2048 if many else 1024)
    given = {
        "gate": gate,
        "up": up,
        "out": out,
        "gate_stride": gate.stride(0),
        "up_stride": up.stride(0),
        "N": size,
        "BLOCK": block,
        "num_warps": warps_for(block, gate.element_size(), vectors=2 if many else 1),
        **launch_options(gate.device),
    }
    return out, [(silu_mul_kernel, (rows, triton.cdiv(size, block)), given)]


silu_mul = Operation(_silu_mul, by_row=2, rows=(1, MANY_ROWS))
"""See `ops.silu_mul`."""
