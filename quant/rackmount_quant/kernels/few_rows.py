"""The product of few rows with a quantized weight, at the speed at which its bytes can be read.

Inputs in 16 bits are multiplied with a weight that becomes 16-bit in registers. Up to 64 rows such
products are as exact as the weight: a group's scale multiplies a float32 sum. Above, it multiplies
the values, and is rounded to 16 bits as they are, which takes fewer registers. Of inputs that were
rounded to the weight's eight bits, both go to the MMA as they are.

How it is cut into programs: `rackmount_quant.kernels.stream_k`. How words hold values:
`rackmount_registry.device.unpack`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_quant.kernels.planes import (
    fp8_planes,
    int4_offset,
    int4_planes,
    int8_planes,
    plane_columns,
)
from rackmount_quant.kernels.stream_k import finish, load_rows, tile_rows
from rackmount_registry.device.prefetch import prefetch
from rackmount_registry.device.unpack import (
    complete,
    unpack_fp8,
    unpack_int4,
    unpack_int8,
)

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes that one prefetch brings."""
SUMS_M: tl.constexpr = tl.constexpr(64)
"""Up to so many tokens a tile scales multiply sums: two sets of more take too many registers."""
OFFSET_M: tl.constexpr = tl.constexpr(16)
"""Up to so many, sums bear what is too much in four-bit values: the tokens are summed for it."""


# A kernel for every number of rows and every share would be compiled in vain.
@triton.jit(do_not_specialize=["M", "share"])
def few_rows_kernel(
    x,
    x_scales,
    words,
    scales,
    zeros,
    bias,
    residual,
    out,
    partials,
    arrivals,
    M,
    N,
    K,
    x_stride,
    x_scale_stride,
    residual_stride,
    row_stride,
    block_stride,
    scale_stride,
    share,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [M, K] with rows `x_stride` apart, a weight [N, K] -> out [M, N] or, of gate and up rows,
    [M, N / 2].

    FORMAT "int4", "int8", "fp8": how `words`, int32 or with PLANES int16, hold a row's values. A
    rounded x has `x_scales`, [groups, at least M] or [1, M] for all columns, and `words` are then
    numbers of its type, in its order. Word j of a row's block of BLOCK_K columns is at row *
    row_stride + block * block_stride + j. PLANES: see `planes`; there is a product for each.

    `scales` where GROUPED [rows / ROWS_PER_SCALE, columns / group], each for BLOCKS_PER_SCALE
    blocks, with `zeros` alike or None; else [N], one a row. Since a row's lie side by side, the
    first of some blocks waits for the memory, and the others find theirs in L1.

    M is at most BLOCK_M. HALVES: see `stream_k.load_rows`; PARTS, `partials`, `arrivals`: `finish`
    there. ALIGNED: no program has blocks of two tiles. PREFETCH: the words of so many blocks are
    called into L2 before x may be read; so are the first and the last of a program's scales and
    zeros in each row. WARPS: of a program.
    """
    ROUNDED: tl.constexpr = x_scales is not None
    BITS: tl.constexpr = words.dtype.element_ty.primitive_bitwidth
    NUM: tl.constexpr = 4 if FORMAT == "int4" else 2  # values of a half word
    OFFSET: tl.constexpr = PLANES and FORMAT == "int4" and BLOCK_M <= OFFSET_M
    W: tl.constexpr = BLOCK_K if ROUNDED else BLOCK_K // NUM // (BITS // 16)
    SCALED_SUMS: tl.constexpr = GROUPED and (
        PLANES or ROUNDED or (BLOCK_M <= SUMS_M and BLOCK_M <= BLOCK_K)
    )
    blocks = tl.cdiv(K, BLOCK_K)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, tl.cdiv(N, BLOCK_N) * blocks)
    tile = first // blocks
    m, j = tl.arange(0, BLOCK_M), tl.arange(0, W)
    if COMPILED:
        start = first - tile * blocks
        if PREFETCH > 0:
            _prefetch(
                words, tile, start, blocks, N, row_stride, block_stride, BLOCK_N, W, PREFETCH,
                SILU_MUL,
            )  # fmt: skip
        if GROUPED:
            ends = tl.minimum(start + tl.arange(0, 2) * (share - 1), blocks - 1)
            called = tile_rows(tile, N, BLOCK_N, SILU_MUL) // ROWS_PER_SCALE * scale_stride
            called = called[:, None] + (ends // BLOCKS_PER_SCALE)[None, :]
            prefetch(scales + called)
            if zeros is not None:
                prefetch(zeros + called)
    if not GROUPED and ALIGNED:
        row_scales = load_rows(scales, tile, N, BLOCK_N, SILU_MUL, 1, 1, HALVES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SCALED_SUMS:
        group = (first - tile * blocks) // BLOCKS_PER_SCALE
        sum_scale = load_rows(
            scales + group, tile, N, BLOCK_N, SILU_MUL, ROWS_PER_SCALE, scale_stride, HALVES
        )
    # Sums of a loop that may be empty can come from no MMA. ptxas then runs all MMAs one by one.
    tl.assume(first < last)
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    for flat in tl.range(first, last):
        if not ALIGNED:
            tile = flat // blocks
        block = flat - tile * blocks
        column = block * BLOCK_K
        rows = tile_rows(tile, N, BLOCK_N, SILU_MUL).to(tl.int64)
        place = rows // ROWS_PER_SCALE * scale_stride + block // BLOCKS_PER_SCALE
        if GROUPED and not SCALED_SUMS:  # on its way while the words are waited for
            scale = tl.load(scales + place)
        at = words + block.to(tl.int64) * block_stride + rows[:, None] * row_stride + j[None, :]
        if EVEN_K:
            packed = tl.load(at)
        else:
            first_column = column + j[None, :] // (128 // BITS) * (8 * NUM)  # of 16 bytes
            packed = tl.load(at, mask=first_column < K, other=0.0)
        if zeros is None:
            zero = None
        elif OFFSET:
            zero = load_rows(
                zeros + block // BLOCKS_PER_SCALE, tile, N, BLOCK_N, SILU_MUL, ROWS_PER_SCALE,
                scale_stride, HALVES,
            ).to(tl.float32)  # fmt: skip
        else:
            zero = tl.load(zeros + place).to(tl.float32)
        dtype: tl.constexpr = x.dtype.element_ty
        part = tl.zeros((BLOCK_N, BLOCK_M), SUM) if SCALED_SUMS else acc
        if PLANES:
            part = _add_planes(
                part, packed, zero, x, m, j, column, M, K, x_stride, FORMAT, NUM, OFFSET, EVEN_K,
                WARPS, COMPILED,
            )  # fmt: skip
        else:
            if ROUNDED:
                values = packed
            elif FORMAT == "int4":
                values = unpack_int4(packed, zero, dtype, COMPILED)
            elif FORMAT == "int8":
                values = unpack_int8(packed, zero, dtype, COMPILED)
            else:
                values = unpack_fp8(packed, dtype, COMPILED)
            if GROUPED and not SCALED_SUMS:
                values *= scale.to(dtype)[:, None]
            tokens = _tokens(x, m, column + tl.arange(0, BLOCK_K), M, K, x_stride, EVEN_K)
            part = tl.dot(values, tokens.T, part, out_dtype=SUM)
        if SCALED_SUMS:
            # The next block's, before they are needed.
            following = tl.minimum(flat + 1, last - 1)
            its_tile = tile if ALIGNED else following // blocks
            its_group = (following - its_tile * blocks) // BLOCKS_PER_SCALE
            loaded = load_rows(
                scales + its_group, its_tile, N, BLOCK_N, SILU_MUL, ROWS_PER_SCALE, scale_stride,
                HALVES,
            )  # fmt: skip
            part *= sum_scale.to(tl.float32)[:, None]
            if ROUNDED:
                at = x_scales + block // BLOCKS_PER_SCALE * x_scale_stride
                part *= tl.load(at + m, mask=m < M, other=0.0)[None, :]
            acc += part
            sum_scale = loaded
        elif PLANES or ROUNDED:
            acc = part
        else:
            acc = complete(part, COMPILED)
        if not ALIGNED:  # noqa: SIM102  # two conditions: the first is of compilation
            if (flat + 1 == last) | (flat + 1 == (tile + 1) * blocks):
                sums = acc.to(tl.float32)
                if not GROUPED:
                    sums *= load_rows(scales, tile, N, BLOCK_N, SILU_MUL, 1, 1, HALVES)[:, None]
                    if ROUNDED:
                        sums *= tl.load(x_scales + m, mask=m < M, other=0.0)[None, :]
                finish(
                    sums, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
                    blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, COMPILED,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    if ALIGNED:
        sums = acc.to(tl.float32)
        if not GROUPED:
            sums *= row_scales[:, None]
            if ROUNDED:
                sums *= tl.load(x_scales + m, mask=m < M, other=0.0)[None, :]
        finish(
            sums, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
            blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, COMPILED,
        )  # fmt: skip


@triton.jit
def _add_planes(
    part, packed, zero, x, m, j, column, M, K, x_stride, FORMAT: tl.constexpr, NUM: tl.constexpr,
    OFFSET: tl.constexpr, EVEN_K: tl.constexpr, WARPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """part [BLOCK_N, BLOCK_M] plus the product of a block's planes, which begin at a column."""
    BLOCK_N: tl.constexpr = part.shape[0]
    BLOCK_M: tl.constexpr = part.shape[1]
    dtype: tl.constexpr = x.dtype.element_ty
    if FORMAT == "int4":
        planes = int4_planes(packed, zero, dtype, OFFSET, COMPILED)
    elif FORMAT == "int8":
        planes = int8_planes(packed, zero, dtype, COMPILED)
    else:
        planes = fp8_planes(packed, dtype, COMPILED)
    if OFFSET:  # an MMA with rows of ones sums the tokens' columns, for all rows of a warp
        ONES: tl.constexpr = min(16 * WARPS, BLOCK_N)
        total = tl.zeros((ONES, BLOCK_M), tl.float32)
    for i in tl.static_range(NUM):
        k = column + plane_columns(j, i, NUM)
        tokens = _tokens(x, m, k, M, K, x_stride, EVEN_K)
        part = tl.dot(planes[i], tokens.T, part)
        if OFFSET:
            total = tl.dot(tl.full((ONES, j.shape[0]), 1.0, dtype), tokens.T, total)
    if OFFSET:
        excess = int4_offset(zero)
        if zero is not None:
            excess = excess.reshape(BLOCK_N // ONES, ONES, 1)
        part = part.reshape(BLOCK_N // ONES, ONES, BLOCK_M) - excess * total[None]
        part = part.reshape(BLOCK_N, BLOCK_M)
    return part


@triton.jit
def _tokens(x, m, k, M, K, x_stride, EVEN_K: tl.constexpr):
    """Columns k of x, for rows m. Of more than eight, those that there are not are others once
    more, which takes fewer instructions than zeros; not all of them the same one, or all programs
    would ask one part of the L2 for it."""
    FEW: tl.constexpr = m.shape[0] <= 8
    rows = m if FEW else m % M
    at = x + rows[:, None] * x_stride + k[None, :]
    if FEW:
        mask = m[:, None] < M
        if not EVEN_K:
            mask = mask & (k[None, :] < K)
        tokens = tl.load(at, mask=mask, other=0.0)
    elif EVEN_K:
        tokens = tl.load(at)
    else:
        tokens = tl.load(at, mask=k[None, :] < K, other=0.0)
    return tokens


@triton.jit
def _prefetch(
    words,
    tile,
    block,
    blocks,
    N,
    row_stride,
    block_stride,
    BLOCK_N: tl.constexpr,
    W: tl.constexpr,
    PREFETCH: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    """Calls PREFETCH blocks of a tile into L2, from one of the program's on."""
    STEP: tl.constexpr = LINE // (words.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (W + STEP - 1) // STEP
    ahead = tl.arange(0, PREFETCH * LINES)
    block = tl.minimum(block + ahead // LINES, blocks - 1).to(tl.int64)
    rows = tile_rows(tile, N, BLOCK_N, SILU_MUL).to(tl.int64)
    line = block * block_stride + ahead % LINES * STEP
    prefetch(words + rows[:, None] * row_stride + line[None, :])
