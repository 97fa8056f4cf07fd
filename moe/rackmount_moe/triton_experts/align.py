"""Tokens sorted by expert, in blocks that each belong to one: on the device, without waiting for
it, in a number of blocks that follows from the shapes.

A slot is one choice of a token: slot s is choice s % K of token s // K.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

from rackmount_registry.device.launch import launch_options

SEGMENTS = (256, 512, 1024, 2048, 4096)
"""Slots that a program looks through: as many as there are, or the most."""
SEGMENTS_AT_ONCE: tl.constexpr = tl.constexpr(8)

Launch = tuple[JITFunction, tuple[int, ...], dict[str, Any]]
"""Kernel, grid and arguments."""


@dataclass(frozen=True)
class Blocks:
    """Slots by expert. What stands behind the first `count` blocks was never written."""

    experts: Tensor
    """int32 [blocks]: rising."""
    slots: Tensor
    """int32 [blocks, block_m]: rising within an expert; the number of slots stands for none."""
    count: Tensor
    """int32 [1]."""


def align(expert_ids: Tensor, num_experts: int, block_m: int) -> Blocks:
    """Blocks of the slots of expert_ids int32 [T, K], T > 0; those below 0 are in none."""
    blocks, launches = align_launches(expert_ids, num_experts, block_m)
    for kernel, grid, arguments in launches:
        kernel[grid](**arguments)
    return blocks


def align_launches(
    expert_ids: Tensor, num_experts: int, block_m: int
) -> tuple[Blocks, list[Launch]]:
    """Where the blocks will be, and what puts them there."""
    num_slots, device = expert_ids.numel(), expert_ids.device
    most = num_slots // block_m + min(num_slots, num_experts)
    blocks = Blocks(
        experts=torch.empty((most,), dtype=torch.int32, device=device),
        slots=torch.empty((most, block_m), dtype=torch.int32, device=device),
        count=torch.empty((1,), dtype=torch.int32, device=device),
    )
    segments, size = segments_of(num_slots)
    shared: dict[str, Any] = {
        "ids": expert_ids,
        "counts": None,
        "num_slots": num_slots,
        "SIZE": size,
        "BLOCK_E": triton.next_power_of_2(max(32, num_experts)),
        "num_warps": min(8, size // 128),
        **launch_options(device),
    }
    launches: list[Launch] = []
    if segments > 1:
        counts = torch.empty((segments, shared["BLOCK_E"]), dtype=torch.int32, device=device)
        shared["counts"] = counts
        launches.append((count_kernel, (segments,), shared))
    placing = {
        "block_experts": blocks.experts,
        "block_slots": blocks.slots,
        "num_blocks": blocks.count,
        "num_experts": num_experts,
        "segments": segments,
        "BLOCK_M": block_m,
    }
    return blocks, [*launches, (place_kernel, (num_experts, segments), shared | placing)]


def segments_of(num_slots: int) -> tuple[int, int]:
    """How many programs look through the slots, and through how many each."""
    size = next((size for size in SEGMENTS if num_slots <= size), SEGMENTS[-1])
    return triton.cdiv(num_slots, size), size


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(
    ids, counts, num_slots, SIZE: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """ids int32 [num_slots] -> counts int32 [segments, BLOCK_E]: slots of each expert in a segment
    of SIZE."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    expert = tl.load(ids + at, mask=at < num_slots, other=-1)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts + tl.program_id(0) * BLOCK_E + e, _histogram(expert, BLOCK_E))


@triton.jit(do_not_specialize=["num_slots", "segments"])
def place_kernel(
    ids,
    counts,
    block_experts,
    block_slots,
    num_blocks,
    num_slots,
    num_experts,
    segments,
    BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program places the slots of one expert in one segment; all count for themselves where those
    before theirs end. `counts` is None where there is one segment."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own, segment = tl.program_id(0), tl.program_id(1)
    at = segment * SIZE + tl.arange(0, SIZE)
    expert = tl.load(ids + at, mask=at < num_slots, other=-1)
    e = tl.arange(0, BLOCK_E)
    before = tl.full((), 0, tl.int32)
    if counts is None:
        total = _histogram(expert, BLOCK_E)
    else:
        total = tl.zeros((BLOCK_E,), tl.int32)
        for first in tl.range(0, segments, SEGMENTS_AT_ONCE):
            s = first + tl.arange(0, SEGMENTS_AT_ONCE)
            at_s = counts + s[:, None] * BLOCK_E + e[None, :]
            known = tl.load(at_s, mask=(s < segments)[:, None], other=0)
            total += tl.sum(known, 0)
            before += tl.sum(tl.where((s < segment)[:, None] & (e == own)[None, :], known, 0))
    blocks = (total + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(e < own, blocks, 0))
    mine = tl.sum(tl.where(e == own, total, 0))
    mine_blocks = (mine + BLOCK_M - 1) // BLOCK_M
    place = tl.cumsum((expert == own).to(tl.int32), 0) - 1 + before
    tl.store(block_slots + start * BLOCK_M + place, at, mask=expert == own)
    if segment == 0:
        m = mine + tl.arange(0, BLOCK_M)
        empty = m < mine_blocks * BLOCK_M
        none = tl.full((BLOCK_M,), 0, tl.int32) + num_slots
        tl.store(block_slots + start * BLOCK_M + m, none, mask=empty)
        for first in tl.range(0, mine_blocks, 32):
            b = first + tl.arange(0, 32)
            names = tl.full((32,), 0, tl.int32) + own
            tl.store(block_experts + start + b, names, mask=b < mine_blocks)
        if own == num_experts - 1:
            tl.store(num_blocks, start + mine_blocks)


@triton.jit
def _histogram(expert, BLOCK_E: tl.constexpr):
    """How often each expert stands in a vector; those below 0 are not counted."""
    return tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)
