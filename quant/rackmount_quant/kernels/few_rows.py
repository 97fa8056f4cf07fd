"""The product of few rows with a quantized weight, which becomes 16-bit in registers: as exact as
the weight is, at the speed at which its bytes can be read.

How it is cut into programs: `rackmount_registry.device.stream_k`. How words hold values:
`rackmount_registry.device.unpack`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_registry.device.stream_k import finish, load_rows, prefetch, tile_rows
from rackmount_registry.device.unpack import unpack_fp8, unpack_int4, unpack_int8

LINE: tl.constexpr = tl.constexpr(32)
"""Words that one prefetch brings."""


# A kernel for every number of rows and every share would be compiled in vain.
@triton.jit(do_not_specialize=["M", "share"])
def few_rows_kernel(
    x,
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
    residual_stride,
    row_stride,
    block_stride,
    scale_stride,
    share,
    FORMAT: tl.constexpr,
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
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [M, K] with rows `x_stride` apart, a weight [N, K] -> out [M, N] or, of gate and up rows,
    [M, N / 2].

    FORMAT "int4", "int8", "fp8": how int32 `words` hold a row's values. Word j of a row's block of
    BLOCK_K columns is at row * row_stride + block * block_stride + j. `scales` [columns / group,
    rows / ROWS_PER_SCALE] where GROUPED, each for BLOCKS_PER_SCALE blocks, with `zeros` alike or
    None; else [N], one a row.

    M is at most BLOCK_M. HALVES: see `stream_k.load_rows`; PARTS, `partials`, `arrivals`: `finish`
    there. ALIGNED: no program has blocks of two tiles. PREFETCH: so many blocks are called into L2
    before x may be read.
    """
    W: tl.constexpr = BLOCK_K // 8 if FORMAT == "int4" else BLOCK_K // 4
    blocks = tl.cdiv(K, BLOCK_K)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, tl.cdiv(N, BLOCK_N) * blocks)
    tile = first // blocks
    m, k, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, W)
    if COMPILED and PREFETCH > 0:
        start = first - tile * blocks
        _prefetch(
            words, tile, start, blocks, N, row_stride, block_stride, BLOCK_N, W, PREFETCH, SILU_MUL
        )
    if not GROUPED and ALIGNED:
        row_scales = load_rows(scales, tile, N, BLOCK_N, SILU_MUL, 1, HALVES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for flat in tl.range(first, last):
        if not ALIGNED:
            tile = flat // blocks
        block = flat - tile * blocks
        column = block * BLOCK_K
        rows = tile_rows(tile, N, BLOCK_N, SILU_MUL).to(tl.int64)
        at = words + block.to(tl.int64) * block_stride + rows[:, None] * row_stride + j[None, :]
        if EVEN_K:
            packed = tl.load(at)
            mask = m[:, None] < M
        else:
            packed = tl.load(at, mask=column + j[None, :] // 4 * (4 * BLOCK_K // W) < K, other=0)
            mask = (m[:, None] < M) & (column + k[None, :] < K)
        tokens = tl.load(x + m[:, None] * x_stride + (column + k)[None, :], mask=mask, other=0.0)
        group = block // BLOCKS_PER_SCALE * scale_stride
        if zeros is None:
            zero = None
        else:
            zero = tl.load(zeros + group + rows // ROWS_PER_SCALE).to(tl.float32)
        if FORMAT == "int4":
            values = unpack_int4(packed, zero, x.dtype.element_ty, COMPILED)
        elif FORMAT == "int8":
            values = unpack_int8(packed, zero, x.dtype.element_ty, COMPILED)
        else:
            values = unpack_fp8(packed, x.dtype.element_ty, COMPILED)
        if GROUPED:
            scale = load_rows(scales + group, tile, N, BLOCK_N, SILU_MUL, ROWS_PER_SCALE, HALVES)
            acc += tl.dot(values, tokens.T) * scale.to(tl.float32)[:, None]
        else:
            acc = tl.dot(values, tokens.T, acc)
        if not ALIGNED:  # noqa: SIM102  # two conditions: the first is of compilation
            if (flat + 1 == last) | (flat + 1 == (tile + 1) * blocks):
                if not GROUPED:
                    acc *= load_rows(scales, tile, N, BLOCK_N, SILU_MUL, 1, HALVES)[:, None]
                finish(
                    acc, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
                    blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, COMPILED,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if ALIGNED:
        if not GROUPED:
            acc *= row_scales[:, None]
        finish(
            acc, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
            blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, COMPILED,
        )  # fmt: skip


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
    LINES: tl.constexpr = (W + LINE - 1) // LINE
    ahead = tl.arange(0, PREFETCH * LINES)
    block = tl.minimum(block + ahead // LINES, blocks - 1).to(tl.int64)
    rows = tile_rows(tile, N, BLOCK_N, SILU_MUL).to(tl.int64)
    line = block * block_stride + ahead % LINES * LINE
    prefetch(words + rows[:, None] * row_stride + line[None, :])
