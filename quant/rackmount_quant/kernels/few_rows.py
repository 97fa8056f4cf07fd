"""The product of few rows with a quantized weight, at the speed at which its bytes can be read.

Inputs in 16 bits are multiplied with a weight that becomes 16-bit in registers. Such products are
as exact as the weight: its scales multiply float32 sums. Where columns are in groups, sums are in
units of the group that is added next, and go from one to the next by the ratio of the two scales: a
second set of sums would take too many registers, and scales by themselves come too late, since the
compiler calls ahead what an MMA's operands come from and nothing else. Of inputs that were rounded
to the weight's eight bits, both go to the MMA as they are.

How it is cut into programs: `rackmount_quant.kernels.stream_k`. How words hold values:
`rackmount_quant.kernels.packed.panels` and `rackmount_registry.device.unpack`.
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
    ratios,
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
    block_stride,
    scale_stride,
    ratio_stride,
    share,
    ROW_STRIDE: tl.constexpr,
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
    WAITS: tl.constexpr,
    EVEN_N: tl.constexpr,
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
    ROW_STRIDE + block * block_stride + j. PLANES: see `planes`; there is a product for each.

    `scales` where GROUPED [rows / ROWS_PER_SCALE, columns / group], each for BLOCKS_PER_SCALE
    blocks, with `zeros` alike or None; else [N], one a row. `ratios`: `Packed.ratios`, or None.

    M is at most BLOCK_M. EVEN_N: no tile stands out; what is added to a thread's first address is
    then part of its loads. HALVES: see `stream_k.load_rows`; PARTS, WAITS, `partials`, `arrivals`:
    `finish` there. ALIGNED: no program has blocks of two tiles. PREFETCH: the words of so many
    blocks are called into L2 before x may be read; so are the first and the last of a program's
    zeros in each row, or of its scales where x is rounded. WARPS: of a program.
    """
    ROUNDED: tl.constexpr = x_scales is not None
    BITS: tl.constexpr = words.dtype.element_ty.primitive_bitwidth
    NUM: tl.constexpr = 4 if FORMAT == "int4" else 2  # values of a half word
    OFFSET: tl.constexpr = PLANES and FORMAT == "int4" and BLOCK_M <= OFFSET_M
    W: tl.constexpr = BLOCK_K if ROUNDED else BLOCK_K // NUM // (BITS // 16)
    IN_UNITS: tl.constexpr = ratios is not None
    SCALED_SUMS: tl.constexpr = GROUPED and ROUNDED
    # Of fewer elements than threads none are loaded ahead, so they are read twice; but a `split`
    # would change the fragments of planes.
    TWICE: tl.constexpr = BLOCK_N < 32 * WARPS and not PLANES
    blocks = tl.cdiv(K, BLOCK_K)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, tl.cdiv(N, BLOCK_N) * blocks)
    tile = first // blocks
    m, j = tl.arange(0, BLOCK_M), tl.arange(0, W)
    if COMPILED:
        start = first - tile * blocks
        if PREFETCH > 0:
            _prefetch(
                words, tile, start, blocks, N, ROW_STRIDE, block_stride, BLOCK_N, W, PREFETCH,
                SILU_MUL,
            )  # fmt: skip
        if SCALED_SUMS or zeros is not None:
            ends = tl.minimum(start + tl.arange(0, 2) * (share - 1), blocks - 1)
            called = tile_rows(tile, N, BLOCK_N, SILU_MUL) // ROWS_PER_SCALE * scale_stride
            called = called[:, None] + (ends // BLOCKS_PER_SCALE)[None, :]
            if SCALED_SUMS:
                prefetch(scales + called)
            else:
                prefetch(zeros + called)
    if ALIGNED and not SCALED_SUMS:
        row_scales = _row_scales(
            scales, tile, last - 1, blocks, N, scale_stride, BLOCK_N, SILU_MUL, BLOCKS_PER_SCALE,
            ROWS_PER_SCALE, GROUPED, HALVES,
        )  # fmt: skip
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
        rows = tile_rows(tile, N, BLOCK_N, SILU_MUL, EVEN_N)
        group = block // BLOCKS_PER_SCALE
        along = None
        if IN_UNITS:
            of_rows = ratios + group * ratio_stride + rows // ROWS_PER_SCALE
            if TWICE:
                ratio, _ = tl.load(tl.broadcast_to(of_rows[:, None], (BLOCK_N, 2))).split()
            else:
                ratio = tl.load(of_rows)
        at = words + block * block_stride + (rows[:, None] * ROW_STRIDE + j[None, :])
        if EVEN_K:
            packed = tl.load(at)
        else:
            # Of 16 bytes, which in four bits have eight of each quarter of a block.
            PIECE: tl.constexpr = 8 if FORMAT == "int4" else 8 * NUM
            first_column = column + j[None, :] // (128 // BITS) * PIECE
            packed = tl.load(at, mask=first_column < K, other=0.0)
        if IN_UNITS:
            if COMPILED and (TWICE or BLOCK_N >= 32 * WARPS):
                if PLANES and FORMAT == "int4":  # `packed` would be copied once more
                    along = _nothing(ratio)
                else:
                    packed ^= _nothing(ratio).to(packed.dtype)[:, None]
            if BLOCKS_PER_SCALE > 1:
                ratio = tl.where(block % BLOCKS_PER_SCALE == 0, ratio, 1.0)
            acc *= ratio[:, None]
        if zeros is None:
            zero = None
        elif OFFSET:
            zero = load_rows(
                zeros + group, tile, N, BLOCK_N, SILU_MUL, ROWS_PER_SCALE, scale_stride, HALVES
            ).to(tl.float32)
        else:
            zero = tl.load(zeros + rows // ROWS_PER_SCALE * scale_stride + group).to(tl.float32)
        dtype: tl.constexpr = x.dtype.element_ty
        part = tl.zeros((BLOCK_N, BLOCK_M), SUM) if SCALED_SUMS else acc
        if PLANES:
            part = _add_planes(
                part, packed, zero, along, x, m, j, column, M, K, x_stride, FORMAT, NUM, OFFSET,
                EVEN_K, WARPS, COMPILED,
            )  # fmt: skip
        else:
            if ROUNDED:
                values = packed
            elif FORMAT == "int4":
                values = unpack_int4(packed, zero, dtype, COMPILED, BLOCK_K // 32)
            elif FORMAT == "int8":
                values = unpack_int8(packed, zero, dtype, COMPILED)
            else:
                values = unpack_fp8(packed, dtype, COMPILED)
            tokens = _tokens(x, m, tl.arange(0, BLOCK_K), column, 0, M, K, x_stride, EVEN_K)
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
            part *= tl.load(x_scales + group * x_scale_stride + m, mask=m < M, other=0.0)[None, :]
            acc += part
            sum_scale = loaded
        elif PLANES or ROUNDED:
            acc = part
        else:
            acc = complete(part, COMPILED)
        if not ALIGNED:  # noqa: SIM102  # two conditions: the first is of compilation
            if (flat + 1 == last) | (flat + 1 == (tile + 1) * blocks):
                sums = acc.to(tl.float32)
                if not SCALED_SUMS:
                    sums *= _row_scales(
                        scales, tile, flat, blocks, N, scale_stride, BLOCK_N, SILU_MUL,
                        BLOCKS_PER_SCALE, ROWS_PER_SCALE, GROUPED, HALVES,
                    )[:, None]  # fmt: skip
                    if ROUNDED:
                        sums *= tl.load(x_scales + m, mask=m < M, other=0.0)[None, :]
                finish(
                    sums, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
                    blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, WAITS, WARPS, COMPILED,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    if ALIGNED:
        sums = acc.to(tl.float32)
        if not SCALED_SUMS:
            sums *= row_scales[:, None]
            if ROUNDED:
                sums *= tl.load(x_scales + m, mask=m < M, other=0.0)[None, :]
        finish(
            sums, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
            blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, WAITS, WARPS, COMPILED,
        )  # fmt: skip


@triton.jit
def _nothing(ratio):
    """Zeros, int32 [R]. With them in an MMA's operand that comes from the ratios, too."""
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, 0;",
        "=r,r",
        [ratio.to(tl.int32, bitcast=True)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _row_scales(
    scales, tile, flat, blocks, N, scale_stride, BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, GROUPED: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """What sums of which block `flat` is the last are multiplied with, float32 [BLOCK_N]."""
    at, stride = scales, 1
    if GROUPED:
        at, stride = scales + (flat - tile * blocks) // BLOCKS_PER_SCALE, scale_stride
    row_scales = load_rows(at, tile, N, BLOCK_N, SILU_MUL, ROWS_PER_SCALE, stride, HALVES)
    return row_scales.to(tl.float32)


@triton.jit
def _add_planes(
    part, packed, zero, along, x, m, j, column, M, K, x_stride, FORMAT: tl.constexpr,
    NUM: tl.constexpr, OFFSET: tl.constexpr, EVEN_K: tl.constexpr, WARPS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """part [BLOCK_N, BLOCK_M] plus the product of a block's planes, which begin at a column."""
    BLOCK_N: tl.constexpr = part.shape[0]
    BLOCK_M: tl.constexpr = part.shape[1]
    dtype: tl.constexpr = x.dtype.element_ty
    if FORMAT == "int4":
        planes = int4_planes(packed, zero, along, dtype, OFFSET, COMPILED)
    elif FORMAT == "int8":
        planes = int8_planes(packed, zero, dtype, COMPILED)
    else:
        planes = fp8_planes(packed, dtype, COMPILED)
    if OFFSET:  # an MMA with rows of ones sums the tokens' columns, for all rows of a warp
        ONES: tl.constexpr = min(16 * WARPS, BLOCK_N)
        total = tl.zeros((ONES, BLOCK_M), tl.float32)
    # Of a panel in four bits a plane's are a quarter, in their order.
    k = j if FORMAT == "int4" else plane_columns(j, 0, NUM)
    MORE: tl.constexpr = j.shape[0] if FORMAT == "int4" else 8
    for i in tl.static_range(NUM):
        tokens = _tokens(x, m, k, column, MORE * i, M, K, x_stride, EVEN_K)
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
def _tokens(x, m, k, column, more: tl.constexpr, M, K, x_stride, EVEN_K: tl.constexpr):
    """Columns column + more + k of x, for rows m; added last, `more` becomes part of the loads.

    Of more than eight rows, those that there are not are others once more, which takes fewer
    instructions than zeros; not all of them the same one, or all programs would ask one part of the
    L2 for it."""
    FEW: tl.constexpr = m.shape[0] <= 8
    rows = m if FEW else m % M
    at = x + (rows[:, None] * x_stride + k[None, :]) + column + more
    inside = (column + more + k < K)[None, :]
    if FEW:
        mask = m[:, None] < M
        if not EVEN_K:
            mask = mask & inside
        tokens = tl.load(at, mask=mask, other=0.0)
    elif EVEN_K:
        tokens = tl.load(at)
    else:
        tokens = tl.load(at, mask=inside, other=0.0)
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
