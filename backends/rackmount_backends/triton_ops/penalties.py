"""`penalize`: programs of a neutral row end at once, the others read its counts, and the logits of
the tokens that are there alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_registry.device.launch import launch_options

BLOCK = 4096
"""Ids of a program."""


# Rows may begin anywhere in the step's: a kernel of each alignment would be compiled in a step.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits", "rows"])
def penalize_kernel(
    logits,
    rows,
    factors,
    counts,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    state_row = tl.load(rows + row).to(tl.int64)
    factors += state_row * 3
    repetition = tl.load(factors).to(tl.float32)
    frequency = tl.load(factors + 1).to(tl.float32)
    presence = tl.load(factors + 2).to(tl.float32)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(counts + state_row * V + ids, mask=ids < V, other=0)
        there = found != 0
        places = logits + row * stride + ids
        values = tl.load(places, mask=there, other=0.0)
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        num_output = found & 0x7FFFFFFF
        more = frequency * num_output.to(tl.float32) + tl.where(num_output > 0, presence, 0.0)
        tl.store(places, repeated - more, mask=there)


def _penalize(
    logits: Tensor, rows: Tensor, factors: Tensor, counts: Tensor
) -> tuple[None, list[Launch]]:
    num_rows, size = logits.shape
    assert logits.dtype == torch.float32 and counts.shape[1] == size and factors.shape[1] == 3
    assert logits.stride(1) == 1 and all(t.is_contiguous() for t in (rows, factors, counts))
    given = {
        "logits": logits,
        "rows": rows,
        "factors": factors,
        "counts": counts,
        "stride": logits.stride(0),
        "V": size,
        "BLOCK": BLOCK,
        "num_warps": 4,
        "enable_fp_fusion": False,  # products round before they are summed, as in torch
        **launch_options(logits.device),
    }
    return None, [(penalize_kernel, (num_rows, triton.cdiv(size, BLOCK)), given)]


penalize = Operation(_penalize)
"""See `ops.penalize`. Logits are float32."""
