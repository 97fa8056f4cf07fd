"""The product of few rows with a weight, y = x W^T, at the speed at which the weight can be read.

The weight's rows are the M side of the MMA and the tokens its N side: eight tokens are enough to
fill an instruction. Tiles of BLOCK_N weight rows are cut into blocks of BLOCK_K columns, numbered
tile by tile, and program p sums the blocks [p * share, (p + 1) * share), wherever tiles begin
(stream-K, arXiv 2301.03598), so that all programs read the same number of bytes. Sums of a tile
that several programs share go through memory; the program that comes last adds them, always in the
same order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes that one prefetch brings."""


# A kernel for every number of rows and every share would be compiled in vain.
@triton.jit(do_not_specialize=["M", "share"])
def linear_kernel(
    x,
    weight,
    descriptor,
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
    share,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    PREFETCH: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [M, K] with rows `x_stride` apart, weight [N, K] -> out [M, N] or, of gate and up rows,
    [M, N / 2].

    M is at most BLOCK_M. PARTS: at most so many programs share a tile; `partials` float32
    [programs, 2, BLOCK_M, BLOCK_N] has the sums of a program's first tile and of its last one,
    where it shares them, and `arrivals` int32 [tiles] counts who is done: zeros before and after.
    ALIGNED: no program has blocks of two tiles. `descriptor`: where it is not None the weight is
    read through it, by TMA; with SILU_MUL it is one of [2, N / 2, K]. PREFETCH: so many blocks are
    called into L2 before x may be read. COMPILED: not interpreted, there is inline assembly.
    """
    blocks = tl.cdiv(K, BLOCK_K)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, tl.cdiv(N, BLOCK_N) * blocks)
    tile = first // blocks
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    if COMPILED and PREFETCH > 0:
        _prefetch(weight, tile, first - tile * blocks, N, K, BLOCK_N, BLOCK_K, PREFETCH, SILU_MUL)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, last):
        if not ALIGNED:
            tile = block // blocks
        column = (block - tile * blocks) * BLOCK_K
        if descriptor is None:
            rows = _weight_rows(tile, N, BLOCK_N, SILU_MUL)
            at = weight + rows.to(tl.int64)[:, None] * K + (column + k)[None, :]
            if EVEN_K:
                w = tl.load(at)
            else:
                w = tl.load(at, mask=(column + k)[None, :] < K, other=0.0)
        elif SILU_MUL:
            w = descriptor.load([0, tile * (BLOCK_N // 2), column]).reshape(BLOCK_N, BLOCK_K)
        else:
            w = descriptor.load([tile * BLOCK_N, column])
        mask = m[:, None] < M
        if not EVEN_K:
            mask = mask & ((column + k)[None, :] < K)
        tokens = tl.load(x + m[:, None] * x_stride + (column + k)[None, :], mask=mask, other=0.0)
        acc = tl.dot(w, tokens.T, acc)
        if not ALIGNED:  # noqa: SIM102  # two conditions: the first is of compilation
            if (block + 1 == last) | (block + 1 == (tile + 1) * blocks):
                _finish(
                    acc, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
                    blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, COMPILED,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if ALIGNED:
        _finish(
            acc, bias, residual, out, partials, arrivals, M, N, residual_stride, tile,
            blocks, share, BLOCK_M, BLOCK_N, PARTS, SILU_MUL, COMPILED,
        )  # fmt: skip


@triton.jit
def _weight_rows(tile, N, BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr):
    """Rows of the weight in a tile: consecutive ones, or gate rows and the up rows that belong to
    them. The last ones repeat where the tile stands out."""
    n = tl.arange(0, BLOCK_N)
    if SILU_MUL:
        half = BLOCK_N // 2
        return tl.minimum(tile * half + n % half, N // 2 - 1) + n // half * (N // 2)
    return tl.minimum(tile * BLOCK_N + n, N - 1)


@triton.jit
def _prefetch(
    weight,
    tile,
    block,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    """Calls PREFETCH blocks of a tile into L2, from one of the program's on."""
    STEP: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    rows = _weight_rows(tile, N, BLOCK_N, SILU_MUL)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K * PREFETCH // STEP) * STEP
    k = tl.minimum(k, K - 1)
    at = weight + rows.to(tl.int64)[:, None] * K + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _barrier():
    """All threads' stores come before what any of them does next. `tl.debug_barrier` would keep the
    compiler from pipelining the loop around it."""
    tl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _finish(
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
    COMPILED: tl.constexpr,
):
    """Writes a tile that is complete, or its part; who completes it adds the parts and writes."""
    added = None
    if residual is not None:  # on its way while the programs of a tile wait for each other
        m, n = tl.arange(0, BLOCK_M)[None, :], tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        added = tl.load(residual + m * residual_stride + n, mask=(m < M) & (n < N), other=0.0)
    if PARTS == 1:
        _write(acc, bias, added, out, M, N, tile, BLOCK_M, BLOCK_N, SILU_MUL)
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
                _barrier()
            complete = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == end - begin
            if complete:
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for part in tl.static_range(PARTS):
                    program = begin + part
                    slot = 2 * program + (program * share < start)
                    at = partials + slot * BLOCK_M * BLOCK_N + inner
                    mask = (m < M) & (program <= end)
                    acc += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                tl.store(arrivals + tile, 0)
        if complete:
            _write(acc, bias, added, out, M, N, tile, BLOCK_M, BLOCK_N, SILU_MUL)


@triton.jit
def _write(
    acc,
    bias,
    added,
    out,
    M,
    N,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    """The epilogue of a tile: bias, silu(gate) * up, residual; rounded once."""
    m = tl.arange(0, BLOCK_M)[None, :]
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
    if added is not None:
        value += added.to(tl.float32)
    tl.store(out + m * columns + n, value.to(out.dtype.element_ty), mask=mask)
