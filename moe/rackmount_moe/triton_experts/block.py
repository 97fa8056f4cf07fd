"""One block of a product by the tensor cores: the device functions that `product` is made of.

A tile is BLOCK_N rows of an expert's weight, on the M side of the matrix instruction, times
BLOCK_M tokens, on its N side: eight tokens are enough to fill an instruction, and weights that are
unpacked in registers go straight from there into it. A block is BLOCK_K columns of a tile.

CODE says how a weight is stored: "dense", or by words of "int4", "int8", "fp8" as
`rackmount_registry.device.unpack` takes them.
"""

import triton
import triton.language as tl

from rackmount_registry.device.unpack import complete, unpack_fp8, unpack_int4, unpack_int8


@triton.jit
def tile_rows(n, tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Rows of the weight at places n of a tile: consecutive ones, or eight gate rows and the eight
    up rows that belong to them in turn, which one thread then holds. The last ones repeat where the
    tile stands out."""
    if GATED:
        half = N // 2
        row = tl.minimum(tile * (BLOCK_N // 2) + n // 16 * 8 + n % 8, half - 1)
        row += n // 8 % 2 * half
    else:
        row = tl.minimum(tile * BLOCK_N + n, N - 1)
    return row


@triton.jit
def silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up of a tile [BLOCK_N, BLOCK_M] -> [BLOCK_N / 2, BLOCK_M]."""
    gate, up = acc.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).split()
    return silu_mul(gate, up).reshape(BLOCK_N // 2, BLOCK_M)


@triton.jit
def scale_rows_of(rows, N, BLOCKS: tl.constexpr, GATED: tl.constexpr):
    """Which row of scales a row of the weight has: its own or, with BLOCKS, that of its block of
    128, which begin anew with the up rows."""
    if BLOCKS and GATED:
        half = N // 2
        up = tl.cdiv(half, 128) + (rows - half) // 128
        rows = tl.where(rows < half, rows // 128, up)
    elif BLOCKS:
        rows = rows // 128
    return rows


@triton.jit
def load_weight(
    weight,
    descriptor,
    expert,
    tile,
    rows,
    block,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A block of an expert's rows: [BLOCK_N, BLOCK_K], or [BLOCK_N, words]. Through the descriptor,
    by TMA, where there is one."""
    if descriptor is not None:
        w = descriptor.load([expert, tile * BLOCK_N, block * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
    elif CODE == "dense":
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        at = weight + (expert.to(tl.int64) * N + rows)[:, None] * K + k[None, :]
        if EVEN:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(k < K)[None, :], other=0.0)
    else:
        WORDS: tl.constexpr = BLOCK_K // (8 if CODE == "int4" else 4)
        row = (expert.to(tl.int64) * tl.cdiv(K, BLOCK_K) + block) * N + rows
        w = tl.load(weight + row[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    return w


@triton.jit
def load_tokens(token_at, valid, order, block, K, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_M, BLOCK_K]: what each token's row holds for the stored columns of a block. Zeros of
    tokens that are not `valid` and of columns that there are not."""
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = valid[:, None]
    if order is not None:
        k = tl.load(order + k)
        mask = mask & (k >= 0)[None, :]
    elif not EVEN:
        mask = mask & (k < K)[None, :]
    return tl.load(token_at[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def add_block(
    acc, w, tokens, scale, zero, CODE: tl.constexpr, SCALED: tl.constexpr, COMPILED: tl.constexpr
):
    """acc float32 [BLOCK_N, BLOCK_M] + the block w times its columns of the tokens.

    Quantized values are multiplied as they are, exactly, and a block's sums by its scale, which
    where not SCALED is one for all blocks and left to the caller.
    """
    dtype: tl.constexpr = tokens.dtype
    if CODE == "int4":
        values = unpack_int4(w, zero, dtype, COMPILED)
    elif CODE == "int8":
        values = unpack_int8(w, zero, dtype, COMPILED)
    elif CODE == "fp8":
        values = unpack_fp8(w, dtype, COMPILED)
    else:
        values = w.to(dtype)
    if SCALED:
        acc += tl.dot(values, tokens.T) * scale.to(tl.float32)[:, None]
    else:
        acc = tl.dot(values, tokens.T, acc)
        if CODE != "dense":
            acc = complete(acc, COMPILED)
    return acc
