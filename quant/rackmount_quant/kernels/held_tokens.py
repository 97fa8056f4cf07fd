"""The product of up to eight rows with a weight in four bits, by programs that hold their tokens.

A program goes over tiles of the weight's rows, and each of its warps has the same columns in all of
them. So it reads its part of x once, and keeps it as operands of the MMA; what remains are words
and scales, the next tile's while it multiplies. The warps' sums are added up once a tile. Tokens
and words are in registers, all of a multiprocessor's, and none go through shared memory.

A thread reads 16 bytes of a row at a time, which are 32 of its columns. In which order columns
come, an MMA does not care: it is such that these words are the thread's part of the first operand,
and tokens are taken alike. `packed.panels` and `rackmount_registry.device.unpack` have the words.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.planes import int4_offset, int4_planes

BLOCK_M: tl.constexpr = tl.constexpr(tuning.HELD_ROWS)
BLOCK_N: tl.constexpr = tl.constexpr(tuning.HELD_N)
"""Rows of x and of a tile: those of an MMA."""
WARPS: tl.constexpr = tl.constexpr(tuning.HeldTiling.warps)
"""No fewer: they are the columns of a `tl.dot` where their sums are added up."""


# A kernel for every number of rows and tiles would be compiled in vain.
@triton.jit(do_not_specialize=["M", "tiles"])
def held_tokens_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    residual,
    out,
    M,
    N,
    K,
    tiles,
    x_stride,
    residual_stride,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    UP: tl.constexpr,
    SILU_MUL: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [M, K] with rows `x_stride` apart, a weight [N, K] -> out [M, N] or, of gate and up rows,
    [M, N / 2].

    `words` int32 in panels of 128 columns, BLOCK_STRIDE from one to the next, 16 to a row. `scales`
    [N, columns / group] with rows SCALE_STRIDE apart, each for BLOCKS_PER_SCALE panels; `zeros`
    alike or None. As constants, strides are part of loads. M is at most BLOCK_M, and N is some
    `tiles` of BLOCK_N rows; with SILU_MUL half of a tile are gate rows, and UP rows further are
    their up rows. Each warp has STEPS panels, of which some are past K unless EVEN.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(K, 128)
    first = tl.arange(0, WARPS) * STEPS
    start, programs = tl.program_id(0), tl.num_programs(0)
    packed, scaled, offset = _read(
        words, scales, zeros, start, True, first, blocks, BLOCK_STRIDE, SCALE_STRIDE,
        BLOCKS_PER_SCALE, STEPS, EVEN, UP, SILU_MUL,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Rows of ones sum the tokens' columns. They are joined of halves, as the words' planes are: so
    # both products want their tokens in the same registers.
    half = tl.full((WARPS, BLOCK_N, 16), 1.0, dtype)
    ones = tl.join(half, half).reshape(WARPS, BLOCK_N, 32)
    tokens, totals = (), ()
    for step in tl.static_range(STEPS):
        total = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
        for plane in tl.static_range(4):
            some = _tokens(x, first + step, blocks, plane, M, x_stride, EVEN)
            tokens += (some,)  # type: ignore[assignment]  # it grows while it is compiled
            total = tl.dot(ones, some, total)
        totals += (total,)  # type: ignore[assignment]
    for tile in tl.range(start, tiles, programs, num_stages=1):
        after = tile + programs
        following, its_scales, its_zeros = _read(
            words, scales, zeros, after, after < tiles, first, blocks, BLOCK_STRIDE, SCALE_STRIDE,
            BLOCKS_PER_SCALE, STEPS, EVEN, UP, SILU_MUL,
        )  # fmt: skip
        of_columns = None if SILU_MUL else _of_columns(bias, tile)
        of_places = _of_places(residual, M, residual_stride, tile)
        sums = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
        # Always so. But ptxas makes loads that nothing of their block needs at its end, where they
        # would have no time left.
        if after > start:
            sums = _multiply(packed, scaled, offset, tokens, totals, zeros, STEPS, COMPILED)
        packed, scaled, offset = following, its_scales, its_zeros
        if SILU_MUL:
            _write_gated(sums, bias, out, M, tile, UP)
        else:
            _write(sums, of_columns, of_places, out, M, N, tile)


@triton.jit
def _read(
    words, scales, zeros, tile, there, first, blocks, BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, BLOCKS_PER_SCALE: tl.constexpr, STEPS: tl.constexpr,
    EVEN: tl.constexpr, UP: tl.constexpr, SILU_MUL: tl.constexpr,
):  # fmt: skip
    """A tile's words, int32 [WARPS, 2, 128], scales and zeros, [WARPS, BLOCK_N], for each of a
    warp's steps: zeros for panels past K, and anything where `there` is no tile."""
    # What differs between a thread's loads is added last, so that it becomes part of them.
    eight = tl.arange(0, 2)[None, :, None]
    more = eight * UP if SILU_MUL else eight * 8
    row = tile * 8 if SILU_MUL else tile * BLOCK_N
    its_first = first[:, None, None]
    words += its_first * BLOCK_STRIDE + row * 16 + tl.arange(0, 128)[None, None, :]
    rows = (row + tl.arange(0, 8)[None, None, :]) * SCALE_STRIDE
    OTHER: tl.constexpr = None if EVEN else 0
    packed, scaled, offset = (), (), ()
    for step in tl.static_range(STEPS):
        block = its_first + step
        inside = there if EVEN else (block < blocks) & there
        read = tl.load(words + (more * 16 + step * BLOCK_STRIDE), mask=inside, other=OTHER)
        packed += (read,)  # type: ignore[assignment]  # it grows while it is compiled
        # Loads of fewer elements than threads are made by the thread that needs them.
        if BLOCKS_PER_SCALE == 1:
            at, last = its_first + rows, more * SCALE_STRIDE + step
        else:
            at, last = block // BLOCKS_PER_SCALE + rows, more * SCALE_STRIDE
        read = tl.load(scales + at + last, mask=inside, other=OTHER)
        scaled += (read.reshape(WARPS, BLOCK_N),)  # type: ignore[assignment]
        if zeros is not None:
            read = tl.load(zeros + at + last, mask=inside, other=OTHER)
            offset += (read.reshape(WARPS, BLOCK_N),)  # type: ignore[assignment]
    return packed, scaled, offset


@triton.jit
def _tokens(x, block, blocks, PLANE: tl.constexpr, M, x_stride, EVEN: tl.constexpr):
    """What a plane of each warp's block is multiplied with, [WARPS, 32, BLOCK_M]."""
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, 32)
    inner = m[:, None, None] * x_stride + c[None, None, :]
    mask = m[:, None, None] < M
    if not EVEN:
        mask = mask & (block < blocks)[None, :, None]
    tokens = tl.load(x + block[None, :, None] * 128 + inner + 32 * PLANE, mask=mask, other=0.0)
    tokens = tokens.reshape(BLOCK_M, WARPS, 4, 2, 2, 2).permute(1, 3, 2, 4, 5, 0)
    return tokens.reshape(WARPS, 32, BLOCK_M)


@triton.jit
def _multiply(
    packed, scaled, offset, tokens, totals, zeros, STEPS: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Each warp's part of a tile's sums, float32 [WARPS, BLOCK_N, BLOCK_M]."""
    sums = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.static_range(STEPS):
        if zeros is None:
            part = -int4_offset(None) * totals[step]
        else:
            part = -int4_offset(offset[step].to(tl.float32))[:, :, None] * totals[step]
        halves = _halves(packed[step], COMPILED)
        planes = int4_planes(halves, None, None, tokens[0].dtype, True, COMPILED)
        for plane in tl.static_range(4):
            part = tl.dot(_first_operand(planes[plane]), tokens[4 * step + plane], part)
        sums += part * scaled[step].to(tl.float32)[:, :, None]
    return sums


@triton.jit
def _halves(words, COMPILED: tl.constexpr):
    """int32 [A, B, W] -> int16 [A, B, 2 W], the lower half first."""
    if COMPILED:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [words],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return tl.join(low, high).reshape(words.shape[0], words.shape[1], 2 * words.shape[2])


@triton.jit
def _first_operand(plane):
    """A plane [WARPS, 2, 256] in the order of `_tokens`, [WARPS, BLOCK_N, 32]."""
    plane = plane.reshape(WARPS, 2, 8, 4, 2, 2, 2).permute(0, 1, 2, 4, 3, 5, 6)
    return plane.reshape(WARPS, BLOCK_N, 32)


@triton.jit
def _over_warps(sums):
    """[WARPS, ...] added up over warps, in one axis.

    As a product with ones: its operand goes through shared memory without conflicts, where those of
    `tl.sum` over warps were 32-fold."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    ones = tl.full((1, WARPS), 1.0, tl.float32)
    return tl.dot(ones, sums.reshape(WARPS, SIZE), input_precision="ieee").reshape(SIZE)


@triton.jit
def _places(tile):
    """Row and column of each of a tile's sums, [BLOCK_M * BLOCK_N]."""
    place = tl.arange(0, BLOCK_M * BLOCK_N)
    return place // BLOCK_N, tile * BLOCK_N + place % BLOCK_N


@triton.jit
def _of_columns(bias, tile):
    """A tile's bias as it is read, or None."""
    read = None
    if bias is not None:
        _, column = _places(tile)
        read = tl.load(bias + column)
    return read


@triton.jit
def _of_places(residual, M, residual_stride, tile):
    """A tile's residual as it is read, or None."""
    read = None
    if residual is not None:
        row, column = _places(tile)
        read = tl.load(residual + row * residual_stride + column, mask=row < M, other=0.0)
    return read


@triton.jit
def _write(sums, of_columns, of_places, out, M, N, tile):
    """A tile of out, rounded once."""
    row, column = _places(tile)
    value = _over_warps(sums.permute(0, 2, 1))
    if of_columns is not None:
        value += of_columns.to(tl.float32)
    if of_places is not None:
        value += of_places.to(tl.float32)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=row < M)


@triton.jit
def _write_gated(sums, bias, out, M, tile, UP: tl.constexpr):
    """silu(gate) * up of a tile, rounded once. A gate and its up are neighbouring threads', which
    both have what comes of them: so they meet, and are stored, without shared memory."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    sums = _over_warps(sums.reshape(WARPS, 2, 8, BLOCK_M).permute(0, 3, 2, 1))
    place = tl.arange(0, SIZE)
    half, column, row = place % 2, tile * 8 + place // 2 % 8, place // BLOCK_N
    if bias is not None:
        sums += tl.load(bias + column + half * UP).to(tl.float32)
    pairs = sums.reshape(SIZE // 2, 2), half.reshape(SIZE // 2, 2)
    value, _ = tl.reduce(pairs, 1, _gated)
    value = tl.broadcast_to(value[:, None], (SIZE // 2, 2)).reshape(SIZE)
    mask = (row < M) & (half == 0)
    tl.store(out + row * UP + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(one, its_half, two, half):
    gate, up = tl.where(its_half < half, one, two), tl.where(its_half < half, two, one)
    return gate / (1.0 + tl.exp(-gate)) * up, tl.minimum(its_half, half)
