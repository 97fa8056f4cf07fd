"""The product of many tokens with their experts' weights, block of tokens by block of tokens."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_moe.triton_experts.block import (
    add_block,
    gated,
    load_tokens,
    load_weight,
    scale_rows_of,
    silu_mul,
    tile_rows,
)


# A kernel for every number of slots would be compiled in vain.
@triton.jit(do_not_specialize=["num_slots", "share"])
def product_kernel(
    x,
    weight,
    descriptor,
    scales,
    zeros,
    order,
    experts,
    slots,
    num_blocks,
    factors,
    out,
    num_slots,
    share,
    N,
    K,
    x_stride,
    groups,
    scale_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    HALVES: tl.constexpr,
    ONCE: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [num_slots / share, K] with rows `x_stride` apart -> out [num_slots, N] or, of gate and up
    rows, [num_slots, N / 2], times factors [num_slots] where there are any: slot s is row
    s // share of x.

    A block has up to BLOCK_M slots of one expert: `experts` int32 [blocks], `slots` int32
    [blocks, BLOCK_M] with num_slots for none, which come last, `num_blocks` int32 [1]. Programs
    take tiles of N, block after block, until there are no more, ONCE one each; with HALVES those of
    a block that is not half full are half as large. The weight is as `packing.Packed` says.
    """
    tiles = tl.cdiv(N, BLOCK_N)
    if PDL and GATED:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    # Asked for before it is known whether there are so many blocks: there is room for them.
    expert = tl.load(experts + first // tiles)
    slot = tl.load(slots + first // tiles * BLOCK_M + m)
    total = tl.load(num_blocks) * tiles
    if PDL and not GATED:
        # Blocks are older than the kernel before this one.
        gdc_wait()
        gdc_launch_dependents()
    if ONCE:
        if first < total:
            _tile(
                x, weight, descriptor, scales, zeros, order, expert, first % tiles, slot,
                slots + first // tiles * BLOCK_M, factors, out, num_slots, share, N, K, x_stride,
                groups, scale_rows, BLOCK_M, BLOCK_N, BLOCK_K, CODE, GROUP, SCALE_BLOCKS, GATED,
                EVEN, HALVES, COMPILED,
            )  # fmt: skip
    else:
        for work in tl.range(first, total, tl.num_programs(0)):
            following = tl.minimum(work + tl.num_programs(0), total - 1) // tiles
            its_expert = tl.load(experts + following)
            its_slot = tl.load(slots + following * BLOCK_M + m)
            _tile(
                x, weight, descriptor, scales, zeros, order, expert, work % tiles, slot,
                slots + work // tiles * BLOCK_M, factors, out, num_slots, share, N, K, x_stride,
                groups, scale_rows, BLOCK_M, BLOCK_N, BLOCK_K, CODE, GROUP, SCALE_BLOCKS, GATED,
                EVEN, HALVES, COMPILED,
            )  # fmt: skip
            expert, slot = its_expert, its_slot


@triton.jit
def _tile(
    x, weight, descriptor, scales, zeros, order, expert, tile, slot, slot_at, factors, out,
    num_slots, share, N, K, x_stride, groups, scale_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, SCALE_BLOCKS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    HALVES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A tile, of the slots [BLOCK_M], which stand at `slot_at`: of half of them, if no more are
    filled."""
    if HALVES and tl.load(slot_at + BLOCK_M // 2) == num_slots:
        half = tl.load(slot_at + tl.arange(0, BLOCK_M // 2))
        _multiply(
            x, weight, descriptor, scales, zeros, order, expert, tile, half, factors,
            out, num_slots, share, N, K, x_stride, groups, scale_rows, BLOCK_M // 2, BLOCK_N,
            BLOCK_K, CODE, GROUP, SCALE_BLOCKS, GATED, EVEN, COMPILED,
        )  # fmt: skip
    else:
        _multiply(
            x, weight, descriptor, scales, zeros, order, expert, tile, slot, factors,
            out, num_slots, share, N, K, x_stride, groups, scale_rows, BLOCK_M, BLOCK_N,
            BLOCK_K, CODE, GROUP, SCALE_BLOCKS, GATED, EVEN, COMPILED,
        )  # fmt: skip


@triton.jit
def _multiply(
    x,
    weight,
    descriptor,
    scales,
    zeros,
    order,
    expert,
    tile,
    slot,
    factors,
    out,
    num_slots,
    share,
    N,
    K,
    x_stride,
    groups,
    scale_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """A tile, of the slots [BLOCK_M]."""
    OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SCALED: tl.constexpr = scales is not None and GROUP > 0
    columns = N // 2 if GATED else N
    valid = slot < num_slots
    token_at = x + (slot // share).to(tl.int64) * x_stride
    if GATED and descriptor is not None:
        value = _gated_by_tma(
            descriptor, expert, tile, token_at, valid, K, BLOCK_M, OUT, BLOCK_K, EVEN
        )
    else:
        rows = tile_rows(tl.arange(0, BLOCK_N), tile, N, BLOCK_N, GATED)
        scale_row = expert.to(tl.int64) * scale_rows + scale_rows_of(rows, N, SCALE_BLOCKS, GATED)
        zero_row = expert.to(tl.int64) * N + rows
        order_at = None
        if order is not None:
            order_at = order + expert.to(tl.int64) * tl.cdiv(K, BLOCK_K) * BLOCK_K
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
            # Scales first: they are on their way while the weight is waited for. A row's lie side
            # by side, so most are in L1.
            group = 0
            if GROUP > 0:
                group = step * BLOCK_K // GROUP
            if SCALED:
                scale = tl.load(scales + scale_row * groups + group)
            else:
                scale = None
            if zeros is None:
                zero = None
            else:
                zero = tl.load(zeros + zero_row * groups + group).to(tl.float32)
            w = load_weight(
                weight, descriptor, expert, tile, rows, step, N, K,
                BLOCK_N, BLOCK_K, CODE, EVEN,
            )  # fmt: skip
            tokens = load_tokens(token_at, valid, order_at, step, K, BLOCK_K, EVEN)
            acc = add_block(acc, w, tokens, scale, zero, CODE, SCALED, COMPILED)
        if scales is not None and not SCALED:
            acc *= tl.load(scales + scale_row).to(tl.float32)[:, None]
        value = gated(acc, BLOCK_M, BLOCK_N) if GATED else acc
    if factors is not None:
        value *= tl.load(factors + slot, mask=valid, other=0.0).to(tl.float32)[None, :]
    column = tile * OUT + tl.arange(0, OUT)
    tl.store(
        out + slot.to(tl.int64)[None, :] * columns + column[:, None],
        value.to(out.dtype.element_ty),
        mask=valid[None, :] & (column < columns)[:, None],
    )


@triton.jit
def _gated_by_tma(
    descriptor,
    expert,
    tile,
    token_at,
    valid,
    K,
    BLOCK_M: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """silu(gate) * up of a tile of a dense weight. Its two boxes of rows lie apart in shared
    memory, where the matrix instruction takes them from: each has sums of its own."""
    gate = tl.zeros((OUT, BLOCK_M), tl.float32)
    up = tl.zeros((OUT, BLOCK_M), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        w_gate = descriptor.load([2 * expert, tile * OUT, step * BLOCK_K])
        w_up = descriptor.load([2 * expert + 1, tile * OUT, step * BLOCK_K])
        tokens = load_tokens(token_at, valid, None, step, K, BLOCK_K, EVEN)
        gate = tl.dot(w_gate.reshape(OUT, BLOCK_K), tokens.T, gate)
        up = tl.dot(w_up.reshape(OUT, BLOCK_K), tokens.T, up)
    return silu_mul(gate, up)
