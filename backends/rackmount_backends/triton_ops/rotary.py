"""`rotary_write`: programs over (token, part of the heads, query or key or value), so that none
waits for another's loads."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_backends.triton_ops.launch import LANES, block_of, warps_for
from rackmount_backends.triton_ops.operation import Launch, Operation
from rackmount_registry.device.launch import launch_options

EARLY_TOKENS = 4
"""From here on attention may start while the product before still runs: its programs have equal
shares and fill the GPU whoever ends first. On an H200 a layer of Llama 3.1 8B in four bits takes
1 us less at 4, 8 and 32 requests and 2 to 3 at 64, at 16, 128 and 256 the same within 1 us; 0.5 and
0.9 more at 1 and 2, where few have work (`benchmarks/results/h200/decode_tiles_in_layers.json`)."""
MANY_TOKENS = 128
"""From here on tokens fill the GPU: a program takes all heads of its token, up to
`MAX_ELEMENTS`."""
MAX_ELEMENTS = 8192
MAX_WARPS = 8
MAPPING_WARPS = 4
"""They halve the registers of a thread that two take where a head has 128 features; not timed."""
FP8_MAX = tl.constexpr(448.0)
LEAST = tl.constexpr(16)
"""Rows, and columns, that `tl.dot` takes."""
COLUMNS = tl.constexpr(64)
"""Of a map at a time: more would not fit where numbers have 32 bits."""


@triton.jit
def normed(x, scale, norm, columns, inside, dtype: tl.constexpr):
    """A norm's second half, rounded as it is defined."""
    weight = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    return ((x * scale).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def divided(x, scale):
    """See `rackmount_registry.attention.narrow`."""
    x = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(x, matrix, features, inside, columns, D: tl.constexpr, dtype: tl.constexpr):
    """x times the rows `features` of `matrix` [D, D], some columns."""
    there = inside[:, None] & (columns < D)[None, :]
    rows = tl.load(matrix + features[:, None] * D + columns[None, :], mask=there, other=0.0)
    return tl.dot(x.to(dtype), rows, input_precision="ieee")


@triton.jit
def turn(
    source,
    source_stride,
    target,
    target_stride,
    is_held,
    scales,
    norm,
    eps,
    angles,
    mapping,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Norms the `HEADS` heads at `source`, rotates their first `PAIRED` features, maps them, and
    writes them to `target` where the token `is_held`. `scales`, one for each head that is written,
    `norm`, `angles`, cosines and then sines, and `mapping` [D, D] may be None."""
    HALF: tl.constexpr = PAIRED // 2
    dtype: tl.constexpr = source.dtype.element_ty
    stored: tl.constexpr = target.dtype.element_ty
    PAD: tl.constexpr = 1 if mapping is None else LEAST
    heads = tl.arange(0, max(triton.next_power_of_2(HEADS), PAD))[:, None]
    source += heads * source_stride
    target += heads * target_stride
    pairs = tl.arange(0, max(triton.next_power_of_2(HALF), PAD))
    paired = pairs < HALF
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + (1 if INTERLEAVED else HALF)
    there = (heads < HEADS) & paired[None, :]
    a = tl.load(source + first[None, :], mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=there, other=0.0).to(tl.float32)
    if PAIRED < D:
        rest = PAIRED + tl.arange(0, max(triton.next_power_of_2(D - PAIRED), PAD))
        rest_there = (heads < HEADS) & (rest < D)[None, :]
        c = tl.load(source + rest[None, :], mask=rest_there, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(a * a + b * b, 1)
        if PAIRED < D:
            squares += tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a = normed(a, scale, norm, first, paired, dtype)
        b = normed(b, scale, norm, second, paired, dtype)
        if PAIRED < D:
            c = normed(c, scale, norm, rest, rest < D, dtype)
    if angles is not None:
        cos = tl.load(angles + pairs, mask=paired, other=0.0)[None, :]
        sin = tl.load(angles + HALF + pairs, mask=paired, other=0.0)[None, :]
        a, b = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    if mapping is not None:
        for start in tl.range(0, D, COLUMNS, num_stages=1):
            columns = start + tl.arange(0, min(max(triton.next_power_of_2(D), LEAST), COLUMNS))
            x = product(a, mapping, first, paired, columns, D, dtype)
            x += product(b, mapping, second, paired, columns, D, dtype)
            if PAIRED < D:
                x += product(c, mapping, rest, rest < D, columns, D, dtype)
            x = x.to(dtype)
            if scales is not None:
                x = divided(x, tl.load(scales + heads, mask=heads < HEADS, other=1.0))
            written = (heads < HEADS) & (columns < D)[None, :] & is_held
            tl.store(target + columns[None, :], x.to(stored), mask=written)
        return
    if scales is not None:
        scale = tl.load(scales + heads, mask=heads < HEADS, other=1.0)
        a, b = divided(a, scale), divided(b, scale)
        if PAIRED < D:
            c = divided(c, scale)
    tl.store(target + first[None, :], a.to(stored), mask=there & is_held)
    tl.store(target + second[None, :], b.to(stored), mask=there & is_held)
    if PAIRED < D:
        tl.store(target + rest[None, :], c.to(stored), mask=rest_there & is_held)


@triton.jit
def rotary_write_kernel(
    q,
    k,
    v,
    out,
    positions,
    table,
    q_norm,
    k_norm,
    cache,
    slots,
    k_scale,
    v_scale,
    q_map,
    k_map,
    eps,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    values_stride: tl.int64,  # always, though a small cache needs no more than int32
    slot_stride,
    cache_head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    QUERIES: tl.constexpr = H // PARTS
    KEYS: tl.constexpr = G // PARTS
    token, part, kind = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    angles = table
    if table is not None:
        angles += tl.load(positions + token).to(tl.int64) * PAIRED
    if kind == 0:
        q += token * q_stride + part * QUERIES * q_head_stride
        out += token * (H * D) + part * (QUERIES * D)
        turn(
            q, q_head_stride, out, D, True, None, q_norm, eps, angles, q_map, QUERIES, D,
            PAIRED, INTERLEAVED,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token).to(tl.int64)
        is_held = slot >= 0
        place = cache + slot * slot_stride + part * KEYS * cache_head_stride
        if k_scale is not None:
            k_scale += part * KEYS
            v_scale += part * KEYS
        if kind == 1:
            k += token * k_stride + part * KEYS * k_head_stride
            turn(
                k, k_head_stride, place, cache_head_stride, is_held, k_scale, k_norm, eps, angles,
                k_map, KEYS, D, PAIRED, INTERLEAVED,
            )  # fmt: skip
        else:
            v += token * v_stride + part * KEYS * v_head_stride
            turn(
                v, v_head_stride, place + values_stride, cache_head_stride, is_held, v_scale, None,
                eps, None, None, KEYS, D, D, False,
            )  # fmt: skip


def _rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
    cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_map: Tensor | None = None,
    k_map: Tensor | None = None,
) -> tuple[Tensor, list[Launch]]:
    assert q.stride(2) == k.stride(2) == v.stride(2) == cache.stride(3) == 1
    small = (positions, slots, table, q_norm, k_norm, k_scale, v_scale, q_map, k_map)
    assert all(t is None or t.is_contiguous() for t in small)
    (num_tokens, heads, size), groups = q.shape, k.shape[1]
    assert size % 2 == 0
    out = torch.empty((num_tokens, heads, size), dtype=q.dtype, device=q.device)
    parts = parts_of(num_tokens, heads, groups, size)
    elements = block_of(heads // parts) * block_of(size)
    # With threads for half a head, the compiler reads angles and norms where they are needed;
    # with fewer it would pass them on through shared memory.
    warps = max(warps_for(elements, q.element_size(), vectors=4), block_of(size) // LANES)
    if q_map is not None:
        warps = max(warps, MAPPING_WARPS)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "positions": positions,
        "table": table,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "cache": cache,
        "slots": slots,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "q_map": q_map,
        "k_map": k_map,
        "eps": eps,
        **{f"{name}_stride": x.stride(0) for name, x in zip("qkv", (q, k, v), strict=True)},
        **{f"{name}_head_stride": x.stride(1) for name, x in zip("qkv", (q, k, v), strict=True)},
        "values_stride": cache.stride(0),
        "slot_stride": cache.stride(1),
        "cache_head_stride": cache.stride(2),
        "H": heads,
        "G": groups,
        "D": size,
        "PAIRED": 2 * table.shape[2] if table is not None else size,
        "INTERLEAVED": interleaved and table is not None,
        "PARTS": parts,
        "EARLY": launch_options(q.device)["PDL"] and num_tokens >= EARLY_TOKENS,
        "num_warps": min(warps, MAX_WARPS),
        **launch_options(q.device),
    }
    return out, [(rotary_write_kernel, (num_tokens, parts, 3), given)]


rotary_write = Operation(_rotary_write, by_row=3, rows=(1, EARLY_TOKENS, MANY_TOKENS))
"""See `ops.rotary_write`."""


def parts_of(num_tokens: int, heads: int, groups: int, size: int) -> int:
    """Parts of a token's heads, a divisor of the key/value heads: all of them where tokens are few,
    else as few as leave each at most `MAX_ELEMENTS` query elements."""
    if num_tokens < MANY_TOKENS:
        return groups
    divisors = (n for n in range(1, groups) if groups % n == 0)
    return next((n for n in divisors if heads // n * size <= MAX_ELEMENTS), groups)
