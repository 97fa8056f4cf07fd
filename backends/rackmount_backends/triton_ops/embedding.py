"""`embedding`: programs over (token, chunk of columns)."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.launch import block_of, warps_for
from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_registry.device.launch import launch_options


@triton.jit(do_not_specialize=["first", "num_rows"])
def embedding_kernel(
    ids,
    weight,
    out,
    first,
    num_rows,
    weight_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(ids + token).to(tl.int64) - first
    mine = (row >= 0) & (row < num_rows)
    values = tl.load(weight + row * weight_stride + columns, mask=inside & mine, other=0.0)
    tl.store(out + token * N + columns, values, mask=inside)


def _embedding(ids: Tensor, weight: Tensor, first: int) -> tuple[Tensor, list[Launch]]:
    assert ids.is_contiguous() and weight.stride(1) == 1
    num_rows, size = weight.shape
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    block = block_of(size, most=2048)
    given = {
        "ids": ids,
        "weight": weight,
        "out": out,
        "first": first,
        "num_rows": num_rows,
        "weight_stride": weight.stride(0),
        "N": size,
        "BLOCK": block,
        "num_warps": warps_for(block, weight.element_size(), vectors=2),
        **launch_options(weight.device),
    }
    return out, [(embedding_kernel, (len(ids), triton.cdiv(size, block)), given)]


embedding = Operation(_embedding)
"""See `ops.embedding`."""
