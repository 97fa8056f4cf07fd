"""The experts' results of each token, added in the order of its choices."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["top_k"])
def combine_kernel(results, experts, out, top_k, N, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """results [T, top_k, N], experts int32 [T, top_k], below 0 for none -> out [T, N]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.range(0, top_k):
        slot = token * top_k + choice
        here = tl.load(experts + slot) >= 0
        total += tl.load(results + slot * N + n, mask=(n < N) & here, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)
