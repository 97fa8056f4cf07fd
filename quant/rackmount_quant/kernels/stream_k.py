"""Products of few rows, y = x W^T, cut into programs that read the same number of bytes.

The weight's rows are the M side of the MMA and the tokens its N side: eight tokens are enough to
fill an instruction. Tiles of BLOCK_N weight rows are cut into blocks of BLOCK_K columns, numbered
tile by tile, and program p sums the blocks [p * share, (p + 1) * share), wherever tiles begin
(stream-K, arXiv 2301.03598). Sums of a tile that several programs share go through memory, and are
added up always in the same order: by the program that comes last, or by all that share the tile,
each for some tokens, once the last has come. Those that wait rely on all GPUs' habit of starting
programs by their numbers: then all but those of one tile wait for programs that have started, and
these are no more than the GPU has multiprocessors (`tuning.Tiling.waits`).

These are the parts that do not depend on how the weight is stored. N: the weight's rows. SILU_MUL:
a tile is half gate rows and half the up rows that belong to them. COMPILED: not interpreted, there
is inline assembly.
"""

import triton
import triton.language as tl

READ_AT_ONCE: tl.constexpr = tl.constexpr(128)
"""Sums of parts that a thread reads before it adds them; more take too many registers."""


@triton.jit
def tile_rows(tile, N, BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr, EVEN_N: tl.constexpr = False):
    """Rows of the weight in a tile, [BLOCK_N]: consecutive ones, or gate rows and their up rows.
    The last ones repeat where the tile stands out; EVEN_N: none does."""
    HALF: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    n = tl.arange(0, BLOCK_N)
    rows = tile * HALF + n % HALF
    if not EVEN_N:
        rows = tl.minimum(rows, (N // 2 if SILU_MUL else N) - 1)
    return rows + n // HALF * (N // 2)


@triton.jit
def load_rows(
    at,
    tile,
    N,
    BLOCK_N: tl.constexpr,
    SILU_MUL: tl.constexpr,
    PER: tl.constexpr,
    stride,
    HALVES: tl.constexpr,
):
    """A value for each row of a tile, [BLOCK_N]; at `at` there is one for PER rows of the weight,
    `stride` from the next.

    The compiler lets each thread load what it needs, and moves nothing through shared memory, where
    a load has fewer elements than there are threads. HALVES: two loads of half a tile.
    """
    if HALVES:
        n = tl.arange(0, BLOCK_N // 2)
        if SILU_MUL:
            first = tl.minimum(tile * (BLOCK_N // 2) + n, N // 2 - 1)
            second = first + N // 2
        else:
            first = tl.minimum(tile * BLOCK_N + n, N - 1)
            second = tl.minimum(tile * BLOCK_N + BLOCK_N // 2 + n, N - 1)
        halves = tl.join(tl.load(at + first // PER * stride), tl.load(at + second // PER * stride))
        values = halves.permute(1, 0).reshape(BLOCK_N)
    else:
        values = tl.load(at + tile_rows(tile, N, BLOCK_N, SILU_MUL) // PER * stride)
    return values


@triton.jit
def barrier():
    """All threads' stores come before what any of them does next. `tl.debug_barrier` would keep the
    compiler from pipelining the loop around it."""
    tl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def finish(
    acc,
    bias,
    residual,
    out,
    partials,
    arrivals,
    M,
    N,
    residual_stride,
    tile,
    blocks,
    share,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    WAITS: tl.constexpr,
    WARPS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Writes a tile that is complete, or its part; then the parts are added and written.

    PARTS: at most so many programs share a tile; `partials` float32 [programs, 2, BLOCK_M, BLOCK_N]
    has the sums of a program's first tile and of its last one, where it shares them, and `arrivals`
    int32 [tiles] counts who is done: zeros before and after. WAITS: all programs of a tile add up
    some of its tokens, else the last one adds up all.
    """
    if PARTS == 1:
        write(acc, bias, residual, out, M, N, residual_stride, tile, 0, BLOCK_N, SILU_MUL)
    else:
        start = tile * blocks
        begin, end = start // share, (start + blocks - 1) // share
        complete = begin == end
        if not complete:
            m, n = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
            inner = m * BLOCK_N + n
            program = tl.program_id(0)
            slot = 2 * program + (program * share < start)
            tl.store(partials + slot * BLOCK_M * BLOCK_N + inner, acc, mask=m < M)
            if COMPILED:
                barrier()
            count = end - begin + 1
            place = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
            if WAITS:
                PIECE: tl.constexpr = max(1, BLOCK_M // PARTS)
                pieces = tl.cdiv(M, PIECE)
                if COMPILED:
                    piece, step = program - begin, count
                    while place < count:
                        place = tl.atomic_add(arrivals + tile, 0, sem="acquire")
                else:  # programs run one by one: the last adds up all
                    piece, step = tl.where(place == count - 1, 0, pieces), 1
                for each in tl.range(piece, pieces, step, num_stages=1):
                    sums = _add_parts(
                        partials, each * PIECE, begin, end, start, share, M, BLOCK_M, PIECE,
                        BLOCK_N, PARTS, WARPS,
                    )  # fmt: skip
                    write(
                        sums, bias, residual, out, M, N, residual_stride, tile, each * PIECE,
                        BLOCK_N, SILU_MUL,
                    )  # fmt: skip
                # The last to go leaves the counter at 0; interpreted, the last to come.
                if COMPILED:
                    left = tl.atomic_add(arrivals + tile, 1, sem="relaxed")
                    if left == 2 * count - 1:
                        tl.store(arrivals + tile, 0)
                elif place == count - 1:
                    tl.store(arrivals + tile, 0)
            else:
                complete = place == count - 1
                if complete:
                    acc = _add_parts(
                        partials, 0, begin, end, start, share, M, BLOCK_M, BLOCK_M, BLOCK_N, PARTS,
                        WARPS,
                    )  # fmt: skip
                    tl.store(arrivals + tile, 0)
        if complete:
            write(acc, bias, residual, out, M, N, residual_stride, tile, 0, BLOCK_N, SILU_MUL)


@triton.jit
def _add_parts(
    partials, first, begin, end, start, share, M, BLOCK_M: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, PIECE] of the tile that begins at block `start`, from token `first` on, by the
    programs from `begin` to `end`."""
    m = first + tl.arange(0, PIECE)[None, :]
    inner = m * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    acc = tl.zeros((BLOCK_N, PIECE), tl.float32)
    if BLOCK_N * PIECE * PARTS <= READ_AT_ONCE * 32 * WARPS:
        for part in tl.static_range(PARTS):
            acc += _part(partials, inner, begin + part, end, start, share, BLOCK_M * BLOCK_N, m < M)
    else:
        for program in tl.range(begin, end + 1, num_stages=1):
            acc += _part(partials, inner, program, end, start, share, BLOCK_M * BLOCK_N, m < M)
    return acc


@triton.jit
def _part(partials, inner, program, end, start, share, SIZE: tl.constexpr, mask):
    """A program's sums of the tile that begins at block `start`; zeros for programs past `end`."""
    slot = 2 * program + (program * share < start)
    at = partials + slot * SIZE + inner
    return tl.load(at, mask=mask & (program <= end), other=0.0, cache_modifier=".cg")


@triton.jit
def write(
    acc,
    bias,
    residual,
    out,
    M,
    N,
    residual_stride,
    tile,
    first,
    BLOCK_N: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    """The epilogue of a tile's tokens from `first` on: bias, silu(gate) * up, residual; rounded
    once."""
    BLOCK_M: tl.constexpr = acc.shape[1]
    m = first + tl.arange(0, BLOCK_M)[None, :]
    if SILU_MUL:
        columns = N // 2
        n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[:, None]
        gate, up = acc.reshape(2, BLOCK_N // 2, BLOCK_M).permute(1, 2, 0).split()
        if bias is not None:
            gate += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)
            up += tl.load(bias + columns + n, mask=n < columns, other=0.0).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
    else:
        columns = N
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        value = acc
        if bias is not None:
            value += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)
    mask = (m < M) & (n < columns)
    if residual is not None:
        value += tl.load(residual + m * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m * columns + n, value.to(out.dtype.element_ty), mask=mask)
