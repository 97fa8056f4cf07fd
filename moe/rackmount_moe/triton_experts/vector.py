"""Products of few tokens: each with its experts' weights by itself, on the ordinary cores.

With one token and eight experts a layer's weights are read in some microseconds, about as long as
a kernel that hands tiles through shared memory to the tensor cores takes from its first load to its
last result. Here every thread multiplies what it loaded, and there is no sorting, no padding and no
result per expert: the second product of a token sums over its experts, whose weights are one long
row to it, as far as a program is concerned.

Memory answers late, so what counts is how much is asked for at once: all of it, where registers
hold that, and of the second product before the first is complete.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_moe.triton_experts.block import scale_rows_of, silu_mul
from rackmount_moe.triton_experts.values import BELOW, fp8_values, int4_values
from rackmount_registry.device.prefetch import prefetch
from rackmount_registry.device.unpack import unpack_int8

LINE: tl.constexpr = tl.constexpr(128)
"""Bytes that one prefetch brings."""


@triton.jit(do_not_specialize=["num_rows", "num_choices", "share"])
def vector_kernel(
    x,
    weight,
    scales,
    zeros,
    order,
    experts,
    factors,
    out,
    following,
    num_rows,
    num_choices,
    share,
    N,
    K,
    x_stride,
    groups,
    scale_rows,
    following_size,
    INNER: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    CONVERTS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [num_rows, N] or, of gate and up rows, [num_rows, N / 2]: row r is the sum of the
    products of its slots s = r * num_choices + c, each of row s // share of x and the weight of
    experts[s], times factors[r] where there are any. experts int32 [num_rows, num_choices]; one
    below 0 adds nothing. Gate and up rows have one choice, and without an expert a row of theirs
    holds anything.

    A program has BLOCK_N rows of the weight for one row of the output, and reads INNER blocks of
    BLOCK_K columns of them at a time, a power of two, out of the BLOCKS of each choice in turn: in
    STEPS steps that are all on their way before the first is multiplied; or, where STEPS is 0, in a
    loop, the next ones while it multiplies. The weight is as `packing.Packed` says. PREFETCH: so
    many lines of the same expert's weight in `following`, of `following_size` elements each, are
    called into L2. CONVERTS: the GPU has an instruction that widens FP8.
    """
    OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SPANS: tl.constexpr = BLOCK_K // (32 if CODE == "int4" else 16 if CODE != "dense" else 8)
    row, tile = tl.program_id(0) % num_rows, tl.program_id(0) // num_rows
    columns = N // 2 if GATED else N
    # The rows of what is loaded: rows of the weight, times blocks. Gate and up rows take turns.
    rows = tl.arange(0, BLOCK_N * INNER) // INNER
    if GATED:
        rows = tl.minimum(tile * OUT + rows // 2, columns - 1) + rows % 2 * columns
    else:
        rows = tl.minimum(tile * OUT + rows, columns - 1)
    slot = row * num_choices
    # Of gate and up rows the expert, which is soon asked for; else where those of the choices are.
    chosen = experts + slot
    if PDL and GATED:
        gdc_wait()
        gdc_launch_dependents()
    if GATED:
        chosen = tl.load(chosen)
    if factors is not None:
        factor = tl.load(factors + row).to(tl.float32)
    AHEAD: tl.constexpr = STEPS if STEPS > 0 else 1
    places = _all_token_places(
        x, order, chosen, slot, num_choices, share, K, x_stride, AHEAD, INNER, BLOCK_K, BLOCKS,
        GATED,
    )  # fmt: skip
    if GATED:
        tokens = _load_all(places, AHEAD)  # while the expert is waited for
    loaded = _load_all_weights(
        weight, scales, zeros, chosen, rows, num_choices, N, K, groups, scale_rows,
        AHEAD, INNER, BLOCK_N, BLOCK_K, BLOCKS, SPANS, CODE, GROUP, SCALE_BLOCKS, GATED, EVEN,
    )  # fmt: skip
    if PDL and not GATED:
        # Experts are older than the kernel before this one.
        gdc_wait()
        gdc_launch_dependents()
    if not GATED:
        tokens = _load_all(places, AHEAD)
    if STEPS > 0:
        acc = _multiply(loaded[0], tokens[0], CODE, CONVERTS, COMPILED, BLOCK_N, INNER, SPANS)
        for step in tl.static_range(1, STEPS):
            acc += _multiply(
                loaded[step], tokens[step], CODE, CONVERTS, COMPILED, BLOCK_N, INNER, SPANS
            )
    else:
        acc = tl.zeros((BLOCK_N, INNER, SPANS), tl.float32)
        part, given = loaded[0], tokens[0]
        for first in tl.range(INNER, num_choices * BLOCKS + INNER, INNER, num_stages=1):
            next_part = _load_weight(
                weight, scales, zeros, chosen, rows, first, num_choices,
                N, K, groups, scale_rows, INNER, BLOCK_N, BLOCK_K, BLOCKS, SPANS, CODE, GROUP,
                SCALE_BLOCKS, GATED, EVEN,
            )  # fmt: skip
            at, mask = _token_places(
                x, order, chosen, slot, first, num_choices, share, K, x_stride,
                INNER, BLOCK_K, BLOCKS, GATED,
            )  # fmt: skip
            next_given = tl.load(at, mask=mask, other=0.0)
            acc += _multiply(part, given, CODE, CONVERTS, COMPILED, BLOCK_N, INNER, SPANS)
            part, given = next_part, next_given
    if COMPILED and PREFETCH > 0:
        _prefetch(following, chosen, tile, following_size, PREFETCH)
    # One axis after the other: Triton 3.6 adds other threads' numbers where those of an axis are
    # apart in a warp, as after a reshape to one axis.
    total = tl.sum(tl.sum(acc, 2), 1)
    if GATED:
        gate, up = total.reshape(OUT, 2).split()
        total = silu_mul(gate, up)
    if factors is not None:
        total *= factor
    column = tile * OUT + tl.arange(0, OUT)
    at = out + row.to(tl.int64) * columns + column
    tl.store(at, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _place(chosen, at, num_choices, BLOCKS: tl.constexpr, GATED: tl.constexpr):
    """Of places among the blocks of all choices: choice, expert, block, and whether it is there."""
    if GATED:
        expert = chosen
        choice, block, there = 0, at, (at < BLOCKS) & (expert >= 0)
    else:
        choice, block = at // BLOCKS, at % BLOCKS
        expert = tl.load(chosen + choice, mask=choice < num_choices, other=-1)
        there = expert >= 0
    return choice, tl.maximum(expert, 0).to(tl.int64), block, there


@triton.jit
def _all_token_places(
    x, order, chosen, slot, num_choices, share, K, x_stride,
    AHEAD: tl.constexpr, INNER: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """`_token_places` of the first steps."""
    places = ()
    for step in tl.static_range(AHEAD):
        place = _token_places(
            x, order, chosen, slot, step * INNER, num_choices, share, K, x_stride,
            INNER, BLOCK_K, BLOCKS, GATED,
        )  # fmt: skip
        places += (place,)  # type: ignore[assignment]  # a tuple of no fixed length
    return places


@triton.jit
def _load_all(places, AHEAD: tl.constexpr):
    """What stands at the places of the first steps."""
    tokens = ()
    for step in tl.static_range(AHEAD):
        place = places[step]
        tokens += (tl.load(place[0], mask=place[1], other=0.0),)  # type: ignore[assignment]
    return tokens


@triton.jit
def _load_all_weights(
    weight, scales, zeros, chosen, rows, num_choices, N, K, groups, scale_rows,
    AHEAD: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr, SPANS: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`_load_weight` of the first steps."""
    loaded = ()
    for step in tl.static_range(AHEAD):
        part = _load_weight(
            weight, scales, zeros, chosen, rows, step * INNER, num_choices,
            N, K, groups, scale_rows, INNER, BLOCK_N, BLOCK_K, BLOCKS, SPANS, CODE, GROUP,
            SCALE_BLOCKS, GATED, EVEN,
        )  # fmt: skip
        loaded += (part,)  # type: ignore[assignment]
    return loaded


@triton.jit
def _load_weight(
    weight,
    scales,
    zeros,
    chosen,
    rows,
    first,
    num_choices,
    N,
    K,
    groups,
    scale_rows,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPANS: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """For each row of the tile [BLOCK_K] numbers or the words that hold them, and [SPANS] times its
    scale and its zero, where there are any: so they come to the threads that need them."""
    at = first + tl.arange(0, BLOCK_N * INNER) % INNER
    _, expert, block, there = _place(chosen, at, num_choices, BLOCKS, GATED)
    mask = there[:, None]
    if CODE == "dense":
        k = block[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        place = ((expert * N + rows) * K)[:, None] + k
        if EVEN:
            w = tl.load(weight + place, mask=mask, other=0)
        else:
            w = tl.load(weight + place, mask=mask & (k < K), other=0)
    else:
        WORDS: tl.constexpr = BLOCK_K // (8 if CODE == "int4" else 4)
        place = ((expert * BLOCKS + block) * N + rows)[:, None] * WORDS
        w = tl.load(weight + place + tl.arange(0, WORDS)[None, :], mask=mask, other=0)
    loaded = (w,)
    spans = tl.zeros((1, SPANS), tl.int32)
    group = tl.where(there, block * BLOCK_K // GROUP, 0) if GROUP > 0 else 0
    if scales is not None:
        scale_row = expert * scale_rows + scale_rows_of(rows, N, SCALE_BLOCKS, GATED)
        place = (scale_row * groups + group)[:, None] + spans
        loaded += (tl.load(scales + place),)  # type: ignore[assignment]
    if zeros is not None:
        place = ((expert * N + rows) * groups + group)[:, None] + spans
        loaded += (tl.load(zeros + place),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _token_places(
    x,
    order,
    chosen,
    slot,
    first,
    num_choices,
    share,
    K,
    x_stride,
    INNER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Where what each block is multiplied by stands, [INNER, BLOCK_K], and whether it is there."""
    at = first + tl.arange(0, INNER)
    choice, expert, block, there = _place(chosen, at, num_choices, BLOCKS, GATED)
    k = block[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if order is not None:
        place = order + expert * (BLOCKS * BLOCK_K)
        place = place + k if GATED else place[:, None] + k
        k = tl.load(place, mask=there[:, None], other=-1)
        mask = k >= 0
    elif GATED:
        mask = k < K
    else:
        mask = there[:, None] & (k < K)
    token = ((slot + choice) // share).to(tl.int64) * x_stride
    if not GATED:
        token = token[:, None]
    return x + token + k, mask


@triton.jit
def _multiply(
    loaded,
    tokens,
    CODE: tl.constexpr,
    CONVERTS: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INNER: tl.constexpr,
    SPANS: tl.constexpr,
):
    """float32 [BLOCK_N, INNER, SPANS]: a span is what a thread has of a row in 16 bytes. Quantized
    values are multiplied as they are stored; zeros come off the sums, times which come scales."""
    w, x = loaded[0], tokens.to(tl.float32)
    SPAN: tl.constexpr = x.shape[1] // SPANS
    ZEROS: tl.constexpr = len(loaded) > 2
    if CODE == "int4":
        values, x = int4_values(w, x, COMPILED)
    elif CODE == "fp8":
        values = fp8_values(w, CONVERTS)
    elif CODE == "int8":
        values = unpack_int8(w, None, tokens.dtype, COMPILED).to(tl.float32)
    else:
        values = w.to(tl.float32)
    x = x.reshape(INNER, SPANS, SPAN)
    sums = tl.sum(values.reshape(BLOCK_N, INNER, SPANS, SPAN) * x[None, :, :, :], 3)
    if CODE == "int4" or ZEROS:
        added, one = 0.0, 1.0  # what is with each stored value, and what its x has of the true one
        if CODE == "int4":
            high = (tl.arange(0, SPAN) % 2)[None, None, :] == 1
            one = tl.where(high, 1.0 + 1.0 / 65536, 1.0)
            added = tl.where(high, 128.0 + BELOW, 128.0)
        if ZEROS:
            zero = loaded[2].to(tl.float32).reshape(BLOCK_N, INNER, SPANS)
            sums -= zero * tl.sum(x * one, 2)[None, :, :]
        else:
            added += 8.0 * one
        if CODE == "int4":
            sums -= tl.sum(x * added, 2)[None, :, :]
    if len(loaded) > 1:
        sums *= loaded[1].to(tl.float32).reshape(BLOCK_N, INNER, SPANS)
    return sums


@triton.jit
def _prefetch(weight, expert, tile, size, LINES: tl.constexpr):
    """Calls a tile's share of an expert's weight into L2."""
    STEP: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    at = tile * LINES * STEP + tl.arange(0, LINES) * STEP
    prefetch(weight + tl.maximum(expert, 0).to(tl.int64) * size + tl.minimum(at, size - 1))
