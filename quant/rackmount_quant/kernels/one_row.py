"""The product of one row with a quantized weight, on the ordinary cores.

All registers of a GPU hold a whole layer's weight. So a program loads the words of its rows before
it waits for the kernel that makes x, and what remains then is to read x, to multiply, and to add up
once: no program shares a row with another. Each thread multiplies what it loaded, in float32, and a
group's scale multiplies a float32 sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_quant.kernels.stream_k import tile_rows
from rackmount_registry.device.unpack import and_xor

FP8_POWER: tl.constexpr = tl.constexpr(2.0**60)
"""An e4m3 number's bits in float32 are 2^-120 times it: half of that is in x, half in the sums. So
x ends at 2^68 there."""


@triton.jit
def one_row_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    residual,
    out,
    N,
    K,
    block_stride,
    scale_stride,
    ROW_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [K], a weight [N, K] -> out [N] or, of gate and up rows, [N / 2]. Words, `scales`, `zeros`:
    see `few_rows.few_rows_kernel`.

    A program has BLOCK_N rows of the weight and reads STEP blocks of BLOCK_K columns at a time, the
    next ones while it multiplies. ONCE: these are all. EVEN_K: they divide K.
    """
    W: tl.constexpr = BLOCK_K // (8 if FORMAT == "int4" else 4)
    PIECES: tl.constexpr = W // 4  # of 16 bytes
    tile, blocks = tl.program_id(0), tl.cdiv(K, BLOCK_K)
    rows = tile_rows(tile, N, BLOCK_N, SILU_MUL).to(tl.int64)
    # Row by row, so that a thread has the same columns of each, if it can: x is then read once.
    rows = tl.broadcast_to(rows[:, None], (BLOCK_N, STEP)).reshape(BLOCK_N * STEP)
    step = tl.arange(0, BLOCK_N * STEP) % STEP
    at = words + rows[:, None] * ROW_STRIDE + tl.arange(0, W)[None, :]
    place = rows // ROWS_PER_SCALE * scale_stride
    packed = _load_words(at, step, blocks, K, block_stride, BLOCK_K, W, EVEN_K)
    scale, zero = None, None
    if GROUPED:
        scale = _load_group(
            scales, place, step, blocks, BLOCKS_PER_SCALE, PIECES, ONCE, EVEN_K, COMPILED
        )
    if zeros is not None:
        zero = _load_group(
            zeros, place, step, blocks, BLOCKS_PER_SCALE, PIECES, ONCE, EVEN_K, COMPILED
        )
    column = tile * (BLOCK_N // 2 if SILU_MUL else BLOCK_N)
    column += tl.arange(0, BLOCK_N // 2 if SILU_MUL else BLOCK_N)
    columns = N // 2 if SILU_MUL else N
    inside = column < columns
    if not GROUPED:
        row_scales = tl.load(scales + tile_rows(tile, N, BLOCK_N, SILU_MUL))
    if bias is not None:
        first_bias = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if SILU_MUL:
            up_bias = tl.load(bias + columns + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = _load_row(x, 0, K, BLOCK_K, STEP, PIECES, EVEN_K)
    if residual is not None:
        added = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    if ONCE:
        acc = _products(packed, scale, zero, row, FORMAT, BLOCK_N, COMPILED)
    else:
        acc = tl.zeros((BLOCK_N, STEP, PIECES), tl.float32)
        for first in tl.range(0, blocks, STEP, num_stages=1):
            block = first + STEP + step
            next_packed = _load_words(at, block, blocks, K, block_stride, BLOCK_K, W, False)
            next_row = _load_row(x, first + STEP, K, BLOCK_K, STEP, PIECES, False)
            acc += _products(packed, scale, zero, row, FORMAT, BLOCK_N, COMPILED)
            packed, row = next_packed, next_row
            if GROUPED:
                scale = _load_group(
                    scales, place, block, blocks, BLOCKS_PER_SCALE, PIECES, False, False, COMPILED
                )
            if zeros is not None:
                zero = _load_group(
                    zeros, place, block, blocks, BLOCKS_PER_SCALE, PIECES, False, False, COMPILED
                )
    # One axis after the other: Triton 3.6 adds other threads' numbers where those of an axis are
    # apart in a warp, as after a reshape to one axis.
    total = tl.sum(tl.sum(acc, 2), 1)
    if not GROUPED:
        total *= row_scales
    if SILU_MUL:
        gate, up = total.reshape(2, BLOCK_N // 2).permute(1, 0).split()
        if bias is not None:
            gate += first_bias
            up += up_bias
        total = gate / (1.0 + tl.exp(-gate)) * up
    elif bias is not None:
        total += first_bias
    if residual is not None:
        total += added
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_words(
    at, block, blocks, K, block_stride, BLOCK_K: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr
):
    """The words of a block of each row, [R, W]; at [R, W], block [R]. EVEN: all are there."""
    at += block.to(tl.int64)[:, None] * block_stride
    if EVEN:
        packed = tl.load(at)
    else:
        # From the first column of 16 bytes to that of the next.
        PIECE: tl.constexpr = 8 if BLOCK_K == 8 * W else BLOCK_K // W * 4
        column = block[:, None] * BLOCK_K + tl.arange(0, W)[None, :] // 4 * PIECE
        packed = tl.load(at, mask=column < K, other=0)
    return packed


@triton.jit
def _load_group(
    at,
    place,
    block,
    blocks,
    BLOCKS_PER_SCALE: tl.constexpr,
    PIECES: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """What a block's group has in each row, float32 [R, PIECES]; past the end the last group's.

    The layout of the load becomes that of the sums. ONCE: a few threads have all of a row, so that
    sums go through shared memory, and need few shuffles to be added up. In a loop each thread keeps
    its own: to the compiler neighbours must not be side by side, or it would load them so.
    """
    R: tl.constexpr = block.shape[0]
    if not EVEN:
        block = tl.minimum(block, blocks - 1)
    place += block // BLOCKS_PER_SCALE
    if ONCE:
        group = tl.load(at + tl.broadcast_to(place[:, None], (R, PIECES)))
    else:
        place = tl.broadcast_to(place[None, :], (PIECES, R))
        if COMPILED:
            place = tl.inline_asm_elementwise(
                "mov.b64 $0, $1;", "=l,l", [place], dtype=tl.int64, is_pure=True, pack=1
            )
        group = tl.load(at + place).trans()
    return group.to(tl.float32)


@triton.jit
def _load_row(
    x,
    first,
    K,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """STEP blocks of x from block `first` on, [STEP, PIECES, columns of a piece], by eight columns:
    where there are as many pieces as threads each loads what it multiplies."""
    SPAN: tl.constexpr = BLOCK_K // PIECES
    piece, eight = tl.arange(0, STEP * PIECES)[:, None], tl.arange(0, 8)[None, :]
    if SPAN == 16:
        k = first * BLOCK_K + piece * SPAN + eight
        row = tl.join(_load_part(x, k, K, EVEN), _load_part(x, k + 8, K, EVEN))
    else:  # four bits, of which a piece has eight of each quarter of a block
        NEXT: tl.constexpr = BLOCK_K // 4
        k = (first + piece // PIECES) * BLOCK_K + piece % PIECES * 8 + eight
        row = tl.join(
            tl.join(_load_part(x, k, K, EVEN), _load_part(x, k + 2 * NEXT, K, EVEN)),
            tl.join(_load_part(x, k + NEXT, K, EVEN), _load_part(x, k + 3 * NEXT, K, EVEN)),
        ).reshape(STEP * PIECES, 8, 4)
    return row.permute(0, 2, 1).reshape(STEP, PIECES, SPAN)


@triton.jit
def _load_part(x, k, K, EVEN: tl.constexpr):
    """Columns k of x; EVEN: all are there."""
    if EVEN:
        part = tl.load(x + k)
    else:
        part = tl.load(x + k, mask=k < K, other=0.0)
    return part


@triton.jit
def _products(
    packed,
    scale,
    zero,
    row,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Sums of the products of each piece, float32 [BLOCK_N, STEP, PIECES]."""
    STEP: tl.constexpr = row.shape[0]
    PIECES: tl.constexpr = row.shape[1]
    SPAN: tl.constexpr = row.shape[2]
    row = row.to(tl.float32)
    values = _values(packed, FORMAT, COMPILED).reshape(BLOCK_N, STEP, PIECES, SPAN)
    if FORMAT == "fp8":
        row *= FP8_POWER
    sums = tl.sum(values * row[None, :, :, :], 3)
    # What values are too large by takes one product a piece for all rows, not one sum a value.
    if FORMAT == "fp8":
        sums *= FP8_POWER
    else:
        more = tl.where(tl.arange(0, SPAN) // 8 % 2 == 0, 256.0, 16.0)
        if FORMAT == "int8":
            more = tl.full((SPAN,), 384.0, tl.float32)
        elif zero is None:
            more += 8.0
        sums -= tl.sum(row * more[None, None, :], 2)[None, :, :]
    if zero is not None:
        sums -= zero.reshape(BLOCK_N, STEP, PIECES) * tl.sum(row, 2)[None, :, :]
    if scale is not None:
        sums *= scale.reshape(BLOCK_N, STEP, PIECES)
    return sums


@triton.jit
def _values(words, FORMAT: tl.constexpr, COMPILED: tl.constexpr):
    """words int32 [R, W], see `rackmount_registry.device.unpack` -> float32 [R, columns]: of a
    nibble n, 256 + n in the even eights of columns and 16 + n in the odd ones; of a signed byte n,
    384 + n; of an e4m3 byte v, v / FP8_POWER^2.

    A nibble in bits 15 to 18 of the mantissa of 256, or in bits 19 to 22 of that of 16, is that
    number plus n. No 16-bit numbers are between.
    """
    R: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    NUM: tl.constexpr = 4 if FORMAT == "int4" else 2  # values of a half word
    if FORMAT == "fp8":
        low = tl.join(_float8(words << 24), _float8(words << 16))
        high = tl.join(_float8(words << 8), _float8(words))
    elif FORMAT == "int8":
        low = tl.join(_byte(words << 15, COMPILED), _byte(words << 7, COMPILED))
        high = tl.join(_byte(words >> 1, COMPILED), _byte(words >> 9, COMPILED))
    else:
        low = _nibbles(words << 15, words << 7, COMPILED)
        high = _nibbles(words >> 1, words >> 9, COMPILED)
    values = tl.join(low, high).reshape(R, W // 4, 4, NUM, 2).permute(0, 1, 3, 2, 4)
    return values.reshape(R, 2 * NUM * W).to(tl.float32, bitcast=True)


@triton.jit
def _nibbles(first, second, COMPILED: tl.constexpr):
    """Those in bits 15 to 22 of each, [R, W, 4]."""
    nibbles = tl.join(
        tl.join(
            and_xor(first, 0x00078000, 0x43800000, COMPILED),
            and_xor(second, 0x00078000, 0x43800000, COMPILED),
        ),
        tl.join(
            and_xor(first, 0x00780000, 0x41800000, COMPILED),
            and_xor(second, 0x00780000, 0x41800000, COMPILED),
        ),
    )
    return nibbles.reshape(first.shape[0], first.shape[1], 4)


@triton.jit
def _byte(words, COMPILED: tl.constexpr):
    """The one in bits 15 to 22, its sign turned: 128 more."""
    return and_xor(words, 0x007F8000, 0x43C00000, COMPILED)


@triton.jit
def _float8(words):
    """The highest byte: its exponent and mantissa move to where they stand in float32."""
    return (words >> 4) & -0x78100000
