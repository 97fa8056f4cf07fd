"""Products of few tokens: each with its experts' weights by itself, on the ordinary cores.

With one token and eight experts a layer's weights are read in some microseconds, about as long as
a kernel that hands tiles through shared memory to the tensor cores takes from its first load to its
last result. Here every thread multiplies what it loaded, and there is no sorting, no padding and no
result per expert: the second product of a token sums over its experts, whose weights are one long
row to it, as far as a program is concerned.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_moe.triton_experts.block import scale_rows_of, silu_mul
from rackmount_registry.device.prefetch import prefetch
from rackmount_registry.device.unpack import unpack_fp8, unpack_int4, unpack_int8

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes that one prefetch brings."""


@triton.jit(do_not_specialize=["num_rows", "num_choices", "share"])
def vector_kernel(
    x,
    weight,
    scales,
    zeros,
    order,
    experts,
    factors,
    out,
    following,
    num_rows,
    num_choices,
    share,
    N,
    K,
    x_stride,
    groups,
    scale_rows,
    following_size,
    MAX_CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [num_rows, N] or, of gate and up rows, [num_rows, N / 2]: row r is the sum of the
    products of its slots s = r * num_choices + c, each of row s // share of x and the weight of
    experts[s], times factors[r] where there are any. experts int32 [num_rows, num_choices]; one
    below 0 adds nothing.

    A program has BLOCK_N rows of the weight for one row of the output, and reads STEP blocks of
    BLOCK_K columns of all choices at a time, the next ones while it multiplies. The weight is as
    `packing.Packed` says; MAX_CHOICES is a power of two. PREFETCH: so many lines of the same
    expert's weight in `following`, of `following_size` elements each, are called into L2.
    """
    INNER: tl.constexpr = MAX_CHOICES * STEP
    OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SPAN: tl.constexpr = 32 if CODE == "int4" else 16 if CODE != "dense" else 8  # of 16 bytes
    row, tile = tl.program_id(0) % num_rows, tl.program_id(0) // num_rows
    columns = N // 2 if GATED else N
    blocks = tl.cdiv(K, BLOCK_K)
    # The rows of what is loaded: rows of the weight, times choices, times blocks.
    i, r = tl.arange(0, INNER), tl.arange(0, BLOCK_N * INNER)
    n = tl.minimum(tile * OUT + r // INNER % OUT, columns - 1) + r // INNER // OUT * columns
    choice_i, choice_r = i // STEP, r // STEP % MAX_CHOICES
    if PDL and GATED:
        gdc_wait()
        gdc_launch_dependents()
    at = experts + row * num_choices
    expert_i = tl.load(at + choice_i, mask=choice_i < num_choices, other=-1)
    expert_r = tl.load(at + choice_r, mask=choice_r < num_choices, other=-1)
    w = _load_weight(weight, expert_r, n, r % STEP, blocks, N, K, BLOCK_K, CODE, EVEN)
    if PDL and not GATED:
        # Experts are older than the kernel before this one.
        gdc_wait()
        gdc_launch_dependents()
    x += ((row * num_choices + choice_i) // share).to(tl.int64)[:, None] * x_stride
    tokens = _load_tokens(x, order, expert_i, i % STEP, blocks, K, BLOCK_K)
    acc = tl.zeros((BLOCK_N, INNER, BLOCK_K // SPAN), tl.float32)
    for first in tl.range(0, blocks, STEP, num_stages=1):
        next_r, next_i = first + STEP + r % STEP, first + STEP + i % STEP
        next_w = _load_weight(weight, expert_r, n, next_r, blocks, N, K, BLOCK_K, CODE, EVEN)
        next_tokens = _load_tokens(x, order, expert_i, next_i, blocks, K, BLOCK_K)
        block = first + r % STEP
        expert = tl.maximum(expert_r, 0).to(tl.int64)
        group = tl.minimum(block, blocks - 1) * BLOCK_K // GROUP if GROUP > 0 else 0
        zero = None
        if zeros is not None:
            zero = tl.load(zeros + (expert * N + n) * groups + group).to(tl.float32)
        if CODE == "int4":
            values = unpack_int4(w, zero, tokens.dtype, COMPILED)
        elif CODE == "int8":
            values = unpack_int8(w, zero, tokens.dtype, COMPILED)
        elif CODE == "fp8":
            values = unpack_fp8(w, tokens.dtype, COMPILED)
        else:
            values = w
        products = values.to(tl.float32).reshape(BLOCK_N, INNER, BLOCK_K // SPAN, SPAN)
        products *= tokens.to(tl.float32).reshape(INNER, BLOCK_K // SPAN, SPAN)[None, :, :, :]
        sums = tl.sum(products, 3)
        if scales is not None:
            scale_row = expert * scale_rows + scale_rows_of(n, N, SCALE_BLOCKS, GATED)
            scale = tl.load(scales + scale_row * groups + group)
            scale = scale.to(tl.float32).reshape(BLOCK_N, INNER)
            sums *= scale[:, :, None]
        acc += sums
        w, tokens = next_w, next_tokens
    if COMPILED and PREFETCH > 0:
        _prefetch(following, tl.load(experts + row), tile, following_size, PREFETCH)
    total = tl.sum(tl.sum(acc, 2), 1)
    if GATED:
        gate, up = total.reshape(2, OUT).permute(1, 0).split()
        total = silu_mul(gate, up)
    if factors is not None:
        total *= tl.load(factors + row).to(tl.float32)
    column = tile * OUT + tl.arange(0, OUT)
    at = out + row.to(tl.int64) * columns + column
    tl.store(at, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _load_weight(
    weight,
    expert,
    n,
    block,
    blocks,
    N,
    K,
    BLOCK_K: tl.constexpr,
    CODE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """For each row of the tile, [BLOCK_K] numbers or the words that hold them."""
    mask = ((expert >= 0) & (block < blocks))[:, None]
    expert = tl.maximum(expert, 0).to(tl.int64)
    if CODE == "dense":
        k = block[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        at = weight + ((expert * N + n) * K)[:, None] + k
        if not EVEN:
            mask = mask & (k < K)
    else:
        WORDS: tl.constexpr = BLOCK_K // (8 if CODE == "int4" else 4)
        at = ((expert * blocks + block) * N + n)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        at = weight + at
    return tl.load(at, mask=mask, other=0)


@triton.jit
def _load_tokens(x, order, expert, block, blocks, K, BLOCK_K: tl.constexpr):
    """[INNER, BLOCK_K] of the rows at x [INNER, 1]."""
    k = block[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = ((expert >= 0) & (block < blocks))[:, None]
    if order is not None:
        at = order + tl.maximum(expert, 0).to(tl.int64)[:, None] * blocks * BLOCK_K + k
        k = tl.load(at, mask=mask, other=-1)
        mask = k >= 0
    else:
        mask = mask & (k < K)
    return tl.load(x + k, mask=mask, other=0.0)


@triton.jit
def _prefetch(weight, expert, tile, size, LINES: tl.constexpr):
    """Calls a tile's share of an expert's weight into L2."""
    STEP: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    at = tile * LINES * STEP + tl.arange(0, LINES) * STEP
    prefetch(weight + tl.maximum(expert, 0).to(tl.int64) * size + tl.minimum(at, size - 1))
