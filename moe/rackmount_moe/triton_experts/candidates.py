"""Plans that are worth a try on a GPU."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from rackmount_moe.triton_experts.launches import vector_cut
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import BLOCK_SIZES, MAX_FEW, Plan, Tiling

FEWEST_BYTES_IN_FLIGHT = 32 << 10
"""Of a multiprocessor, while tokens are few: less cannot hide the memory's latency."""
MOST_STAGES = 8
BYTES_A_THREAD = (32, 128)
"""Least and most that are read at a time where there are no blocks, in a loop."""
MOST_BYTES_A_THREAD = 512
"""That are read where there is no loop: all in registers."""
MOST_STEPS = 6
"""Without a loop."""
MOST_INPUTS_A_THREAD = 128
"""Numbers of x, in a register each."""
INPUT_BYTES = 2
"""Of a number of x."""


def block_sizes(num_tokens: int, num_experts: int, top_k: int) -> list[int]:
    """Slots of a block that are worth a try; 0: no blocks."""
    if num_tokens <= 2:
        return [0]
    each = min(max(4, 2 * num_tokens * top_k / num_experts), 16 * BLOCK_SIZES[-1])
    few = [0] if num_tokens <= MAX_FEW else []
    return few + [size for size in BLOCK_SIZES if size and size / 4 <= each <= 16 * size]


def tilings(
    packed: Packed, block_m: int, choices: int, shared_memory: int, *, tma: bool
) -> Iterator[Tiling]:
    """Of a product with such a weight: in blocks of `block_m` slots, or without blocks, where a
    token's result is the sum over `choices` slots.

    Args:
        shared_memory: bytes that a program may have.
        tma: whether the GPU has a tensor memory accelerator.
    """
    if not block_m:
        yield from _vector_tilings(packed, choices)
        return
    dense = packed.code == "dense"
    for block_n, cut_k, warps in _cuts(dense, block_m):
        block_k = cut_k or packed.block_k
        weight = int(block_n * block_k * _itemsize(packed))
        stage = weight + block_m * block_k * INPUT_BYTES
        seen = set()
        for programs in (1, 2, 3, 4, 6):
            # A weight that is unpacked in registers leaves its last stage early.
            spare = shared_memory // programs - 2048 + (0 if dense else weight)
            stages = min(spare // stage, MOST_STAGES)
            resident = shared_memory // (stages * stage + 2048)
            starved = block_m < 64 and resident * (stages - 1) * weight < FEWEST_BYTES_IN_FLIGHT
            if stages < 2 or starved or stages in seen:
                continue
            seen.add(stages)
            for registers in _bounds(dense, block_m, block_n, warps):
                yield Tiling(block_n, block_k, stages, warps, registers=registers)
            if tma and dense and block_n >= 128 and (block_m >= 64 or programs < 3):
                yield Tiling(block_n, block_k, stages, warps, tma=True)


def _cuts(dense: bool, block_m: int) -> tuple[tuple[int, int, int], ...]:
    """block_n, block_k (0: the weight's own) and warps."""
    if dense and block_m >= 64:
        return (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)
    if dense:
        return (32, 256, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (64, 256, 4)
    if block_m >= 64:
        return (64, 0, 4), (128, 0, 8)
    # Every tile of a block reads its tokens again: wide ones less often.
    return (64, 0, 4), (128, 0, 4), (128, 0, 8), (256, 0, 8), (256, 0, 16)


def _bounds(dense: bool, block_m: int, block_n: int, warps: int) -> tuple[int, ...]:
    """Of a thread's registers. What unpacks values waits for memory, for arithmetic and for the
    tensor cores in turn: a third or fourth program of a multiprocessor fills the gaps."""
    crowded = not dense and block_m <= 32 and (block_n, warps) == (128, 4)
    return (0, 128, 168) if crowded else (0,)


def _vector_tilings(packed: Packed, choices: int) -> Iterator[Tiling]:
    least, most = BYTES_A_THREAD
    for block_n, block_k, warps in itertools.product(
        (2, 4, 8, 16, 32), (128, 256, 512, 1024, 2048), (1, 2, 4, 8)
    ):
        divisible = not packed.block_k or block_k % packed.block_k == 0
        inputs = choices * block_k // (32 * warps)
        if not divisible or block_k >= 2 * packed.columns or inputs > MOST_INPUTS_A_THREAD:
            continue
        *_, steps = vector_cut(packed, Tiling(block_n, block_k, 2, warps), choices)
        read = block_n * block_k * choices * _itemsize(packed) / (32 * warps)
        if steps <= MOST_STEPS and least <= read <= steps * read <= MOST_BYTES_A_THREAD:
            yield Tiling(block_n, block_k, steps, warps)
        elif least <= read <= most and packed.columns % block_k == 0:
            yield Tiling(block_n, block_k, 2, warps)


def _itemsize(packed: Packed) -> float:
    return {"dense": INPUT_BYTES, "int4": 0.5}.get(packed.code, 1)


def neighbours(plan: Plan) -> Iterator[Plan]:
    """What differs from a good plan in one respect that costs no new kernel, or few."""
    if not plan.block_m:
        for prefetch in (64, 128, 256):
            yield replace(plan, prefetch=prefetch)
        return
    for programs in (1, 2, 3, 4):
        first = replace(plan, gate_up=replace(plan.gate_up, programs=programs))
        yield first
        yield replace(first, down=replace(plan.down, programs=programs))
