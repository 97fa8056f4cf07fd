"""`rms_norm` and `add_rms_norm`: one program a row, which stays in registers between its two
passes."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.launch import block_of, warps_for
from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_registry.device.launch import launch_options

MANY_ROWS = 512
"""From here on rows fill the GPU: fewer threads a row, with more of its bytes in flight each."""


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    x_head_stride,
    residual_stride,
    eps,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = row // HEADS * x_stride + row % HEADS * x_head_stride
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    if ADD:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        values = (wide + added.to(tl.float32)).to(values.dtype)
        tl.store(total + row * N + columns, values, mask=inside)
        wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / N + eps)
    normed = normed.to(values.dtype).to(tl.float32) * scales.to(tl.float32)
    tl.store(out + row * N + columns, normed.to(values.dtype), mask=inside)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, list[Launch]]:
    assert x.stride(-1) == 1 and x.dtype == weight.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Up to two leading dimensions have strides of their own: tokens, and heads in a wider tensor.
    heads = x.flatten(0, -3) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
    return out, [_launch(heads, None, weight, out, None, eps)]


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    assert x.stride(-1) == residual.stride(-1) == 1
    assert x.dtype == residual.dtype == weight.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    return (out, total), [_launch(x.unsqueeze(1), residual, weight, out, total, eps)]


def _launch(
    heads: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
) -> Launch:
    tokens, per_token, size = heads.shape
    rows, block = tokens * per_token, block_of(size)
    given = {
        "x": heads,
        "residual": residual,
        "weight": weight,
        "out": out,
        "total": total,
        "x_stride": heads.stride(0),
        "x_head_stride": heads.stride(1),
        "residual_stride": residual.stride(0) if residual is not None else 0,
        "eps": eps,
        "HEADS": per_token,
        "N": size,
        "BLOCK": block,
        "ADD": residual is not None,
        "num_warps": warps_for(block, heads.element_size(), vectors=4 if rows >= MANY_ROWS else 1),
        **launch_options(heads.device),
    }
    return norm_kernel, (rows,), given


rms_norm = Operation(_rms_norm, by_row=1, rows=(1, MANY_ROWS))
"""See `ops.rms_norm`."""
add_rms_norm = Operation(_add_rms_norm, by_row=2, rows=(1, MANY_ROWS))
"""See `ops.add_rms_norm`."""
