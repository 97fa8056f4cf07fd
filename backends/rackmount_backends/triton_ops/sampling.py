"""`sample`: a survey of all logits by many programs, then one program a row that looks only where
the token can be.

The vocabulary is in parts of `PART` ids. `survey_kernel` reads every logit once, and leaves of each
part its largest and, for the draws from everything, a bound of what its tokens reach in the race.
`choose_kernel` then reads the parts that matter, and computes as the definition does:

- greedy: the first part that holds the largest logit.
- whole: parts by falling bound, until none can hold a better token than the best so far.
- top-p: whoever wins the race of all tokens is the token if it is among those kept, which the mass
  before it in the order tells (a pass over the parts whose largest is not below it). If it is not,
  all that are kept come before it: the race is run again among those before it, and so on. Every
  such round leaves, in the mean, less than half of the mass.
- top-k: the same, in the count as well, from the parts that can hold one of the k most likely: the
  k-th largest of the parts' largest is not above the k-th largest logit. Where top-p is on, too,
  its mass is a part of that of the k tokens, so the k-th logit is found first, by bisection.

No program sorts, and the host learns nothing: it fits a CUDA graph. The tokens are those of the
definition on the same GPU, whose logarithms and exponentials these are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.launch import block_of
from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_backends.triton_ops.race import (
    INF,
    LOG2_E,
    end_of,
    list_parts,
    measure,
    pivot_of,
    race_all,
    race_before,
)
from rackmount_backends.triton_ops.random import log2_bound, row_key
from rackmount_registry.device.launch import launch_options
from rackmount_registry.sampling import Draw, SamplingState

PART = 256
"""Ids of a part."""
PARTS = 16
"""Parts that a program holds at once."""

GREEDY = tl.constexpr(Draw.GREEDY.value)
WHOLE = tl.constexpr(Draw.WHOLE.value)
TOP_K = tl.constexpr(Draw.TOP_K.value)
TOP_P = tl.constexpr(Draw.TOP_P.value)


@triton.jit
def survey_kernel(
    logits,
    rows,
    positions,
    draws,
    numbers,
    seeds,
    maxima,
    bounds,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each part the largest logit, +inf for a NaN, and how far above it, in temperatures and
    base 2, any of its tokens can come in the race."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_PARTS: tl.constexpr = (V + PART - 1) // PART
    row = tl.program_id(1).to(tl.int64)
    parts = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    ids = parts[:, None] * PART + tl.arange(0, PART)[None, :]
    values = tl.load(logits + row * stride + ids, mask=ids < V, other=-INF).to(tl.float32)
    values = tl.where(values == values, values, INF)
    tops = tl.max(values, 1)
    tl.store(maxima + row * NUM_PARTS + parts, tops, mask=parts < NUM_PARTS)
    state_row = tl.load(rows + row).to(tl.int64)
    draw = tl.load(draws + state_row)
    if (draw == WHOLE) | (draw == TOP_P):
        scale = LOG2_E / tl.load(numbers + state_row * 4).to(tl.float32)
        key = row_key(tl.load(seeds + state_row), tl.load(positions + row))
        base = tl.where((tops > -INF) & (tops < INF), tops, 0.0)
        reached = (values - base[:, None]) * scale - log2_bound(key, ids, LIBDEVICE)
        tl.store(bounds + row * NUM_PARTS + parts, tl.max(reached, 1), mask=parts < NUM_PARTS)


@triton.jit
def choose_kernel(
    logits,
    rows,
    positions,
    draws,
    numbers,
    seeds,
    maxima,
    bounds,
    parts,
    out,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a row. `parts` is scratch for its list."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_PARTS: tl.constexpr = (V + PART - 1) // PART
    row = tl.program_id(0).to(tl.int64)
    state_row = tl.load(rows + row).to(tl.int64)
    draw = tl.load(draws + state_row)
    logits += row * stride
    parts += row * NUM_PARTS
    columns = tl.arange(0, WIDTH)
    surveyed = columns < NUM_PARTS
    tops = tl.load(maxima + row * NUM_PARTS + columns, mask=surveyed, other=-INF)
    top = tl.max(tops)
    token = tl.full([], -1, tl.int32)
    if (top > -INF) & (top < INF):
        if draw == GREEDY:
            part = tl.min(tl.where(tops == top, columns, WIDTH))
            ids = part * PART + tl.arange(0, PART)
            values = tl.load(logits + ids, mask=ids < V, other=-INF).to(tl.float32)
            token = tl.min(tl.where(values == top, ids, V))
        else:
            numbers += state_row * 4
            temperature = tl.load(numbers).to(tl.float32)
            top_k = tl.load(numbers + 1).to(tl.int32)
            top_p = tl.load(numbers + 2)
            min_x = tl.load(numbers + 3).to(tl.float32)
            key = row_key(tl.load(seeds + state_row), tl.load(positions + row))
            enough = tl.full([], 2**62, tl.int64)
            if draw == TOP_K:
                least = pivot_of(tops, top_k)
                count = list_parts(parts, tops, least, NUM_PARTS)
                value, token = -INF, V
                if top_p < 1:
                    value, token = end_of(
                        logits, parts, count, top_k, least, top, V, PART, PARTS, LOW
                    )  # fmt: skip
                    _, total = measure(
                        logits, parts, count, value, token, top, temperature, V, PART, PARTS,
                        LIBDEVICE,
                    )  # fmt: skip
                    enough = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
                value, token = race_before(
                    logits, parts, count, value, token, top, temperature, min_x, key, V, PART,
                    PARTS, LIBDEVICE,
                )  # fmt: skip
            else:
                reached = tl.load(
                    bounds + row * NUM_PARTS + columns, mask=surveyed, other=-INF
                )  # fmt: skip
                value, token = race_all(
                    logits, tops, reached, top, temperature, min_x, key, draw == TOP_P, V, PART,
                    LIBDEVICE,
                )  # fmt: skip
                if draw == TOP_P:
                    count = list_parts(parts, tops, -INF, NUM_PARTS)
                    _, total = measure(
                        logits, parts, count, -INF, V, top, temperature, V, PART, PARTS, LIBDEVICE
                    )  # fmt: skip
                    enough = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
            kept = draw == WHOLE
            while not kept:
                count = list_parts(parts, tops, value, NUM_PARTS)
                number, mass = measure(
                    logits, parts, count, value, token, top, temperature, V, PART, PARTS, LIBDEVICE
                )  # fmt: skip
                # V stands for none: settings that leave no token end here, too.
                kept = (number < top_k) & (mass < enough) | (token == V)
                if not kept:
                    value, token = race_before(
                        logits, parts, count, value, token, top, temperature, min_x, key, V, PART,
                        PARTS, LIBDEVICE,
                    )  # fmt: skip
    tl.store(out + row, tl.where(token < V, token, -1))


LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits at the end of a float32 that are 0 in all numbers of a dtype."""


def _sample(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
) -> tuple[Tensor, list[Launch]]:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and rows.is_contiguous() and positions.is_contiguous()
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    num_parts = triton.cdiv(size, PART)
    maxima = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    shared = {
        "logits": logits,
        "rows": rows,
        "positions": positions,
        "draws": state.draws,
        "numbers": state.numbers,
        "seeds": state.seeds,
        "maxima": maxima,
        "bounds": torch.empty_like(maxima),
        "stride": logits.stride(0),
        "V": size,
        "PART": PART,
        "PARTS": PARTS,
        "LIBDEVICE": logits.is_cuda,
        **launch_options(logits.device),
    }
    choosing = {
        "parts": torch.empty_like(maxima, dtype=torch.int32),
        "out": out,
        "WIDTH": block_of(num_parts),
        "LOW": LOW_BITS[logits.dtype],
    }
    return out, [
        (survey_kernel, (triton.cdiv(num_parts, PARTS), num_rows), shared | {"num_warps": 4}),
        (choose_kernel, (num_rows,), shared | choosing | {"num_warps": 8}),
    ]


sample = Operation(_sample)
"""See `ops.sample`."""
