"""The product of up to eight rows with a weight in four bits, by programs that hold their tokens.

A program goes over tiles of the weight's rows, and each of its warps has the same columns in all of
them. So it reads its part of x once, and keeps it as operands of the MMA; what remains are words
and scales, the next tile's while it multiplies. The warps' sums are added up once a tile. Tokens
and words are in registers, most of an SM's, and none go through shared memory.

A thread reads 16 bytes of a row at a time, which are 32 of its columns. In which order columns
come, an MMA does not care: it is such that these words are the thread's part of the first operand,
and tokens are taken alike. `rackmount_registry.device.unpack` has the words.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_quant.kernels.planes import int4_offset, int4_planes
from rackmount_quant.kernels.stream_k import barrier, depart

LEAST_K: tl.constexpr = tl.constexpr(16)
"""Columns of a first operand that `tl.dot` takes at least."""


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
    partials,
    arrivals,
    M,
    N,
    K,
    tiles,
    x_stride,
    residual_stride,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    SLICES: tl.constexpr,
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
    alike or None. As constants, strides are part of loads. M is at most BLOCK_M, and BLOCK_N, 16 or
    32 rows of the weight, divides N; with SILU_MUL half of a tile are gate rows, and UP rows
    further are their up rows.

    Each of SLICES programs that share tiles has as many panels, and each of its WARPS, 8 or more,
    has STEPS of them; EVEN: all warps have panels. What slices give is added up at the end: they
    leave float32 [tiles, SLICES, BLOCK_M * BLOCK_N] in `partials`, wait for each other, which
    `tuning.HeldTiling` says when they may, and each adds up some tiles. `arrivals` int32 counts who
    is done, zeros before and after.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(K, 128)
    team, member = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    teams = tl.num_programs(0) // SLICES
    share = tl.cdiv(blocks, SLICES)
    first = member * share + tl.arange(0, WARPS) * STEPS
    end = tl.minimum(member * share + share, blocks)
    packed = ()
    for step in tl.static_range(STEPS):
        read = _words(words, team, first + step, end, UP, BLOCK_STRIDE, BLOCK_N, SILU_MUL, EVEN)
        packed += (read,)  # type: ignore[assignment]  # it grows while it is compiled
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tokens, totals = (), ()
    for step in tl.static_range(STEPS):
        total = tl.zeros((WARPS, 16, BLOCK_M), tl.float32)
        for plane in tl.static_range(4):
            some = _tokens(x, first + step, end, plane, M, x_stride, BLOCK_M, WARPS, EVEN)
            tokens += (some,)  # type: ignore[assignment]
            # Rows of ones, which are all alike, sum the tokens' columns.
            total = tl.dot(tl.full((WARPS, 16, 32), 1.0, dtype), some, total)
        totals += (tl.max(total, 1),)  # type: ignore[assignment]
    for tile in tl.range(team, tiles, teams, num_stages=1):
        after = tl.minimum(tile + teams, tiles - 1)
        acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
        following = ()
        for step in tl.static_range(STEPS):
            block = first + step
            group = block // BLOCKS_PER_SCALE
            scale = _of_rows(
                scales, tile, group, block, end, UP, SCALE_STRIDE, BLOCK_N, SILU_MUL, EVEN
            )
            if zeros is None:
                excess = int4_offset(None) * totals[step]
                part = -tl.broadcast_to(excess[:, None, :], (WARPS, BLOCK_N, BLOCK_M))
            else:
                zero = _of_rows(
                    zeros, tile, group, block, end, UP, SCALE_STRIDE, BLOCK_N, SILU_MUL, EVEN
                )
                part = -int4_offset(zero)[:, :, None] * totals[step][:, None, :]
            planes = int4_planes(_halves(packed[step], COMPILED), None, None, dtype, True, COMPILED)
            for plane in tl.static_range(4):
                part = tl.dot(_first_operand(planes[plane]), tokens[4 * step + plane], part)
            acc += part * scale[:, :, None]
            read = _words(
                words, after, first + step, end, UP, BLOCK_STRIDE, BLOCK_N, SILU_MUL, EVEN
            )
            following += (read,)  # type: ignore[assignment]
        packed = following
        if SLICES > 1:
            place = tl.arange(0, BLOCK_M * BLOCK_N)
            at = partials + (tile * SLICES + member) * (BLOCK_M * BLOCK_N) + place
            tl.store(at, _sums(acc), mask=place // BLOCK_N < M)
        elif SILU_MUL:
            gate, up = _half_sums(acc)
            if bias is not None:
                place = tl.arange(0, BLOCK_M * BLOCK_N // 2)
                column = tile * (BLOCK_N // 2) + place % (BLOCK_N // 2)
                gate += tl.load(bias + column).to(tl.float32)
                up += tl.load(bias + UP + column).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
            _write(value, None, None, out, M, UP, 0, tile, BLOCK_N // 2)
        else:
            _write(_sums(acc), bias, residual, out, M, N, residual_stride, tile, BLOCK_N)
    if SLICES > 1:
        _add_slices(
            bias, residual, out, partials, arrivals, M, N, tiles, residual_stride, team, teams,
            member, BLOCK_M, BLOCK_N, SLICES, COMPILED,
        )  # fmt: skip


@triton.jit
def _words(
    words, tile, block, end, UP: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    SILU_MUL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A block's for each warp, by eight rows of a tile: int32 [WARPS, BLOCK_N / 8, 128]."""
    EIGHTS: tl.constexpr = BLOCK_N // 8
    HALF: tl.constexpr = EIGHTS // 2 if SILU_MUL else EIGHTS
    eight = tl.arange(0, EIGHTS)
    row = (tile * HALF + eight % HALF) * 8
    if SILU_MUL:
        row += eight // HALF * UP
    inner = row[None, :, None] * 16 + tl.arange(0, 128)[None, None, :]
    at = words + block[:, None, None] * BLOCK_STRIDE + inner
    if EVEN:
        read = tl.load(at)
    else:
        read = tl.load(at, mask=(block < end)[:, None, None], other=0)
    return read


@triton.jit
def _of_rows(
    at, tile, group, block, end, UP: tl.constexpr, STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    SILU_MUL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Each warp's group's scale, or its zero, of a tile's rows: float32 [WARPS, BLOCK_N]. Loads of
    fewer elements than threads are made by the thread that needs them."""
    n = tl.arange(0, 16)
    if BLOCK_N == 16 and SILU_MUL:
        row = tile * 8 + n % 8 + n // 8 * UP
    elif SILU_MUL:
        row = tile * 16 + n
    else:
        row = tile * BLOCK_N + n
    values = _of_some(at, group, row, block, end, STRIDE, EVEN)
    if BLOCK_N == 32:
        more = _of_some(at, group, row + (UP if SILU_MUL else 16), block, end, STRIDE, EVEN)
        values = tl.join(values, more).permute(0, 2, 1).reshape(block.shape[0], 32)
    return values.to(tl.float32)


@triton.jit
def _of_some(at, group, row, block, end, STRIDE: tl.constexpr, EVEN: tl.constexpr):
    at += group[:, None] + row[None, :] * STRIDE
    if EVEN:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=(block < end)[:, None], other=0)
    return values


@triton.jit
def _tokens(
    x, block, end, PLANE: tl.constexpr, M, x_stride, BLOCK_M: tl.constexpr, WARPS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """What a plane of each warp's block is multiplied with, [WARPS, 32, BLOCK_M]."""
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, 32)
    inner = m[:, None, None] * x_stride + (c // 8 * 32 + c % 8)[None, None, :]
    mask = m[:, None, None] < M
    if not EVEN:
        mask = mask & (block < end)[None, :, None]
    tokens = tl.load(x + block[None, :, None] * 128 + inner + 8 * PLANE, mask=mask, other=0.0)
    tokens = tokens.reshape(BLOCK_M, WARPS, 4, 2, 2, 2).permute(1, 3, 2, 4, 5, 0)
    return tokens.reshape(WARPS, 32, BLOCK_M)


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
    """A plane [WARPS, BLOCK_N / 8, 256] in the order of `_tokens`, [WARPS, BLOCK_N, 32]."""
    WARPS: tl.constexpr = plane.shape[0]
    EIGHTS: tl.constexpr = plane.shape[1]
    plane = plane.reshape(WARPS, EIGHTS, 8, 4, 2, 2, 2).permute(0, 1, 2, 4, 3, 5, 6)
    return plane.reshape(WARPS, 8 * EIGHTS, 32)


@triton.jit
def _sums(acc):
    """Over warps, of [WARPS, R, M]: float32 [M * R].

    As a product with ones: its operand goes through shared memory without conflicts, where those of
    `tl.sum` over warps were 32-fold."""
    WARPS: tl.constexpr = acc.shape[0]
    SIZE: tl.constexpr = acc.shape[1] * acc.shape[2]
    if WARPS < LEAST_K:
        one, two = _half_sums(acc)
        sums = tl.join(one, two).permute(1, 0).reshape(2, acc.shape[2], acc.shape[1] // 2)
        sums = sums.permute(1, 0, 2).reshape(SIZE)
    else:
        flat = acc.permute(0, 2, 1).reshape(WARPS, SIZE)
        ones = tl.full((1, WARPS), 1.0, tl.float32)
        sums = tl.dot(ones, flat, input_precision="ieee").reshape(SIZE)
    return sums


@triton.jit
def _half_sums(acc):
    """`_sums` of the first half of the rows and of the second."""
    WARPS: tl.constexpr = acc.shape[0]
    R: tl.constexpr = acc.shape[1]
    M: tl.constexpr = acc.shape[2]
    if WARPS < LEAST_K:  # both halves are one operand
        flat = acc.reshape(WARPS, 2, R // 2, M).permute(0, 1, 3, 2)
        flat = flat.reshape(2 * WARPS, M * R // 2)
        half = tl.arange(0, 2 * WARPS)[None, :] % 2
        one = tl.dot((half == 0).to(tl.float32), flat, input_precision="ieee")
        two = tl.dot((half == 1).to(tl.float32), flat, input_precision="ieee")
        one, two = one.reshape(M * R // 2), two.reshape(M * R // 2)
    else:
        one, two = acc.reshape(WARPS, 2, R // 2, M).permute(0, 2, 3, 1).split()
        one, two = _sums(one), _sums(two)
    return one, two


@triton.jit
def _write(
    value, bias, residual, out, M, columns, residual_stride, tile, COLUMNS: tl.constexpr
):  # fmt: skip
    """A tile's values [rows of x * COLUMNS], with bias and residual; rounded once."""
    place = tl.arange(0, value.shape[0])
    row, column = place // COLUMNS, tile * COLUMNS + place % COLUMNS
    inside = row < M
    if bias is not None:
        value += tl.load(bias + column).to(tl.float32)
    if residual is not None:
        at = residual + row * residual_stride + column
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_slices(
    bias, residual, out, partials, arrivals, M, N, tiles, residual_stride, team, teams, member,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Waits until all slices of the team's tiles are there, then adds up some of its tiles."""
    if COMPILED:
        barrier()
    place = tl.atomic_add(arrivals + team, 1, sem="acq_rel")
    if COMPILED:
        first, step = team + member * teams, teams * SLICES
        while place < SLICES:
            place = tl.atomic_add(arrivals + team, 0, sem="acquire")
    else:  # programs run one by one: the last adds up all
        first, step = tl.where(place == SLICES - 1, team, tiles), teams
    inner = tl.arange(0, BLOCK_M * BLOCK_N)
    for tile in tl.range(first, tiles, step, num_stages=1):
        sums = tl.zeros((BLOCK_M * BLOCK_N,), tl.float32)
        for part in tl.static_range(SLICES):
            at = partials + (tile * SLICES + part) * (BLOCK_M * BLOCK_N) + inner
            mask = inner // BLOCK_N < M
            sums += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        _write(sums, bias, residual, out, M, N, residual_stride, tile, BLOCK_N)
    depart(arrivals + team, place, SLICES, COMPILED)
