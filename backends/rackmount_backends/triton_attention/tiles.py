"""Sizes of tiles: all that is tuned by measurement, as plain functions of the layer.

A tile of K or V is [block_n, head size padded to a power of two]; `num_stages - 1` pairs of them
are in flight per program.
"""

from dataclasses import dataclass, replace

SHARED_BYTES = {(8, 0): 163 * 2**10, (8, 7): 163 * 2**10, (9, 0): 227 * 2**10, (10, 0): 227 * 2**10}
"""Shared memory of a multiprocessor that programs may use, by compute capability."""
LEAST_SHARED_BYTES = 99 * 2**10
"""Of the others, at least."""
MOST_WARPS, MOST_FP8_WARPS = 16, 12
"""Of the decode kernel, on a multiprocessor: registers allow no more."""
FULL = 0.9
"""So much of a multiprocessor's programs is as good as all."""


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """How the decode kernel is launched."""

    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    """How the prefill kernel is launched."""

    block_m: int
    """Rows of a tile: query tokens times query heads that share a key head."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


def decode_tiles(
    head_size: int, group: int, itemsize: int, capability: tuple[int, int], contexts: float
) -> DecodeTiles:
    """`group` query heads share a key head; `itemsize` bytes an element of the cache. A
    multiprocessor has so many `contexts` to read, each of a request for a key head.

    On an H200 in bfloat16 with head size 128 four stages are the best or within 4 % of it for 1, 64
    and 256 requests of 1100 tokens and for few of 4096 and 8192; 16 requests of 1100 tokens take up
    to 13 % less with three stages (`benchmarks/results/h200/attention_decode_shares.json`). Where
    two programs of four stages do not fit an SM they have three, or what does fit. An FP8 cache has
    three by analogy to what was measured before.

    Where with two stages an SM holds twice as many programs, and each then has a context of its own
    or more, fewer are cut: within a layer of Llama 3.1 8B 64 requests of 300 to 1100 tokens take 2
    to 3 us less, 128 and 256 take 3 to 4, and 64 of 4096 and 8192 the same
    (`benchmarks/results/h200/decode_tiles_in_layers.json`). Alone 256 requests of 1100 take 0.9 %
    more with four key heads, and 0.5 % less with eight (`attention_decode_shares.json`).
    """
    most_bytes, block_n = (128, 128) if itemsize == 1 else (256, 64)
    if padded(head_size) * itemsize > most_bytes:
        block_n //= 2
    room = SHARED_BYTES.get(capability, LEAST_SHARED_BYTES)
    four = DecodeTiles(block_n=block_n, num_warps=4, num_stages=4)
    if itemsize > 1 and room >= 2 * shared_bytes(four, head_size, group, itemsize):
        two = replace(four, num_stages=2)
        few, many = (
            resident_programs(each, head_size, group, itemsize, capability) for each in (four, two)
        )
        return two if itemsize == 2 and many >= 2 * few and contexts >= FULL * many else four
    for tiles in (
        replace(four, num_stages=3),
        replace(four, num_stages=2),
        replace(four, num_stages=2, block_n=block_n // 2),
    ):
        if shared_bytes(tiles, head_size, group, itemsize) <= room:
            break
    return tiles


def shared_bytes(tiles: DecodeTiles, head_size: int, group: int, itemsize: int) -> int:
    """Shared memory that a program of the decode kernel takes: stages of keys and values, the
    queries and the weights of a tile, and what a multiprocessor keeps for itself. 32 bits are
    multiplied in parts."""
    size, rows = padded(head_size), max(16, padded(group))
    stages = 2 * (tiles.num_stages - 1) * tiles.block_n * size * itemsize
    operand = 2 if itemsize < 4 else 2 * itemsize
    return stages + rows * (size + tiles.block_n) * operand + 1024


def resident_programs(
    tiles: DecodeTiles, head_size: int, group: int, itemsize: int, capability: tuple[int, int]
) -> int:
    """Programs of the decode kernel that one multiprocessor holds at once."""
    shared = SHARED_BYTES.get(capability, LEAST_SHARED_BYTES)
    most = MOST_FP8_WARPS if itemsize == 1 else MOST_WARPS
    held = shared_bytes(tiles, head_size, group, itemsize)
    return max(1, min(most // tiles.num_warps, shared // held))


def registers(tiles: DecodeTiles, resident: int) -> int:
    """Of a thread of the decode kernel, at most: more, and a multiprocessor (65536 registers from
    compute capability 7.0 on) would not hold so many programs."""
    return min(255, 65536 // (32 * tiles.num_warps * resident) // 8 * 8)


def prefill_tiles(
    head_size: int,
    group: int,
    longest_chunk: int,
    itemsize: int,
    kv_itemsize: int,
    capability: tuple[int, int],
) -> PrefillTiles:
    """`group` query heads share a key head; `longest_chunk` query tokens at most come from one
    request. Elements of queries and of the cache have so many bytes."""
    if itemsize == 4:
        return PrefillTiles(block_m=padded(max(group, 32)), block_n=32, num_warps=4, num_stages=1)
    wide = padded(head_size) > 128
    block_m = padded(max(group, 128 if longest_chunk * group > 64 else 64))
    if block_m == 64:
        return PrefillTiles(block_m=64, block_n=32 if wide else 64, num_warps=4, num_stages=2)
    if capability < (9, 0) or wide:
        return PrefillTiles(block_m=block_m, block_n=32 if wide else 64, num_warps=8, num_stages=2)
    if kv_itemsize == 1:  # with four warps, what is widened on the way leaves too few registers
        return PrefillTiles(block_m=block_m, block_n=64, num_warps=8, num_stages=3)
    # Two programs of four warps on a multiprocessor: one multiplies while the other takes powers.
    return PrefillTiles(block_m=block_m, block_n=32, num_warps=4, num_stages=3)
