"""The second product where tokens are few: each token's experts one after another, summed at once.

The token's experts are one product with a long inner dimension, whose weight lies in several
places. It needs no sorting of tokens, no results per expert and no kernel that adds them. Where
tiles are too few to keep the GPU busy, several programs share one; the one that comes last adds
their sums, always in the same order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_moe.triton_experts.block import add_block, load_tokens, load_weight, tile_rows
from rackmount_registry.device.stream_k import barrier, prefetch

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes that one prefetch brings."""


@triton.jit(do_not_specialize=["num_tokens", "top_k"])
def sum_kernel(
    x,
    weight,
    descriptor,
    scales,
    zeros,
    order,
    experts,
    partials,
    arrivals,
    out,
    num_tokens,
    top_k,
    N,
    K,
    x_stride,
    groups,
    scale_stride,
    MAX_TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [num_tokens, top_k, K] with rows `x_stride` apart, experts int32 [num_tokens, top_k], -1
    for none -> out [num_tokens, N], the sums over top_k.

    MAX_TOP_K is a power of two. PARTS programs share a tile; `partials` float32
    [tiles, PARTS, num_tokens, BLOCK_N] has their sums, and `arrivals` int32 [tiles, num_tokens]
    counts who is done: zeros before and after. PREFETCH: so many blocks are called into L2 before x
    may be read; `experts` is older than the kernel before this one, so that it can be read then.
    """
    token = tl.program_id(0) % num_tokens
    part = tl.program_id(0) // num_tokens % PARTS
    tile = tl.program_id(0) // num_tokens // PARTS
    steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(top_k * steps, PARTS)
    first = part * share
    last = tl.minimum(first + share, top_k * steps)
    m, n, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, MAX_TOP_K)
    # Kept in registers: a load in the loop, which addresses depend on, would cost the pipeline half
    # of its depth.
    chosen = tl.load(experts + token * top_k + j, mask=j < top_k, other=-1)
    rows = tile_rows(tile, N, BLOCK_N, False)
    if COMPILED and PREFETCH > 0:
        for ahead in tl.static_range(PREFETCH):
            block = tl.minimum(first + ahead, top_k * steps - 1)
            expert = tl.max(tl.where(j == block // steps, chosen, -1))
            _prefetch(weight, tl.maximum(expert, 0), rows, block % steps, N, K, BLOCK_K, CODE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, last):
        choice, step = block // steps, block % steps
        expert = tl.max(tl.where(j == choice, chosen, -1))
        here = expert >= 0
        w = load_weight(
            weight, descriptor, expert, tile, rows, step, N, K, here, BLOCK_N, BLOCK_K, CODE, EVEN
        )
        expert = tl.maximum(expert, 0)
        order_at = None
        if order is not None:
            order_at = order + expert.to(tl.int64) * steps * BLOCK_K
        token_at = x + tl.where(m == 0, token * top_k + choice, 0).to(tl.int64) * x_stride
        tokens = load_tokens(token_at, (m == 0) & here, order_at, step, K, BLOCK_K, EVEN)
        acc = add_block(
            acc, w, tokens, scales, zeros, expert, rows, step, N, groups, scale_stride,
            BLOCK_K, CODE, GROUP, SCALE_BLOCKS, scales is not None,
            False, COMPILED,
        )  # fmt: skip
    total = tl.sum(acc, 1)  # of one token and zeros
    complete = PARTS == 1
    if PARTS > 1:
        own = partials + (tile * PARTS * num_tokens + token) * BLOCK_N + n
        tl.store(own + part * num_tokens * BLOCK_N, total)
        if COMPILED:
            barrier()
        counter = arrivals + tile * num_tokens + token
        complete = tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1
        if complete:
            total = tl.zeros((BLOCK_N,), tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(own + each * num_tokens * BLOCK_N, cache_modifier=".cg")
            tl.store(counter, 0)
    if complete:
        row = tile * BLOCK_N + n
        at = out + token.to(tl.int64) * N + row
        tl.store(at, total.to(out.dtype.element_ty), mask=row < N)


@triton.jit
def _prefetch(weight, expert, rows, block, N, K, BLOCK_K: tl.constexpr, CODE: tl.constexpr):
    """Calls a block of an expert's rows into L2."""
    WIDTH: tl.constexpr = BLOCK_K // (1 if CODE == "dense" else 8 if CODE == "int4" else 4)
    if CODE == "dense":
        at = weight + (expert.to(tl.int64) * N + rows) * K + block * BLOCK_K
    else:
        row = (expert.to(tl.int64) * tl.cdiv(K, BLOCK_K) + block) * N + rows
        at = weight + row * WIDTH
    STEP: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = WIDTH // STEP if WIDTH > STEP else 1
    prefetch(at[:, None] + (tl.arange(0, LINES) * STEP)[None, :])
