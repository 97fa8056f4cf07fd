"""Prefill: several query tokens per request, the last ones of its sequence.

A tile of queries is a stretch of tokens with all query heads that share a key head, so that keys
and values are read once for them. Tiles are listed on the host, the longest context first: the
short ones fill the gaps at the end.
"""

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from rackmount_backends.triton_attention.online_softmax import (
    HIDDEN,
    add_values,
    block_ids,
    fit_queries,
    load_slots,
    weigh,
)
from rackmount_backends.triton_attention.tiles import PrefillTiles, padded
from rackmount_backends.triton_ops.operation import Launch
from rackmount_registry.attention import AttentionParams, DeviceTables, KVScales


@triton.jit
def _add_span(
    out, top, total, q, positions, start, stop, keys_base, values_base, table, slot_stride, columns,
    scale, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys from `start` up to `stop`, all written, for queries at `positions` [M]."""
    offsets = tl.arange(0, BLOCK_N)
    blocks = block_ids(table, tl.minimum(start + offsets, stop - 1), BLOCK_SIZE)
    for at in range(start, stop, BLOCK_N):
        places = tl.minimum(at + offsets, stop - 1)
        here = blocks
        # One tile ahead, so that the loads of keys and values wait for no other load.
        blocks = block_ids(table, tl.minimum(at + BLOCK_N + offsets, stop - 1), BLOCK_SIZE)
        keys = load_slots(keys_base, here, places, slot_stride, columns, BLOCK_SIZE, HEAD_SIZE)
        values = load_slots(values_base, here, places, slot_stride, columns, BLOCK_SIZE, HEAD_SIZE)
        behind = positions[:, None] - (at + offsets)[None, :]
        seen = behind >= 0
        if WINDOW is not None:
            seen = seen & (behind < WINDOW)
        top, shrink, weights = weigh(top, q, keys, seen, scale, MASKED, SOFT_CAP)
        out = add_values(out, shrink, weights, values.to(q.dtype))
        total = total * shrink + tl.sum(weights, 1)
    return out, top, total


@triton.jit
def _prefill(
    out_ptr, q_ptr, keys_ptr, values_ptr,
    tiles_ptr,  # int32 [tiles, 2]: request and the first of its query tokens
    query_start_ptr, seq_lens_ptr, table_ptr,
    k_scale_ptr, v_scale_ptr,  # float32 [G] of an FP8 cache, or None
    q_token_stride, q_head_stride, slot_stride, table_stride,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    request = tl.load(tiles_ptr + 2 * tl.program_id(1))
    first = tl.load(tiles_ptr + 2 * tl.program_id(1) + 1)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    heads = head * GROUP + rows % GROUP
    columns = tl.arange(0, BLOCK_D)
    is_row = (rows < TOKENS * GROUP) & (tokens < query_len)
    fits = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
    flat_tokens = (query_start + tokens).to(tl.int64)
    q_at = (flat_tokens * q_token_stride + heads * q_head_stride)[:, None] + columns[None, :]
    q = tl.load(q_ptr + q_at, mask=fits, other=0.0)
    scale = SCALE
    if k_scale_ptr is not None:
        q, power = fit_queries(q)
        scale = power * tl.load(k_scale_ptr + head) * SCALE

    # Keys from `start` up to `stop` are seen by some row, those from `inner` up to `edge` by all.
    positions = seq_len - query_len + tokens
    first_position = seq_len - query_len + first
    stop = tl.minimum(first_position + TOKENS, seq_len)
    start = 0
    if WINDOW is not None:
        start = tl.maximum(first_position - WINDOW + 1, 0)
    edge = start + (first_position + 1 - start) // BLOCK_N * BLOCK_N
    keys_base = keys_ptr + head * HEAD_SIZE
    values_base = values_ptr + head * HEAD_SIZE
    table = table_ptr + request.to(tl.int64) * table_stride
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    inner = start
    if WINDOW is not None:
        inner = start + tl.cdiv(tl.maximum(stop - WINDOW - start, 0), BLOCK_N) * BLOCK_N
        inner = tl.minimum(inner, edge)
        out, top, total = _add_span(
            out, top, total, q, positions, start, inner,
            keys_base, values_base, table, slot_stride, columns,
            scale, True, SOFT_CAP, WINDOW, HEAD_SIZE, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    out, top, total = _add_span(
        out, top, total, q, positions, inner, edge,
        keys_base, values_base, table, slot_stride, columns,
        scale, False, SOFT_CAP, WINDOW, HEAD_SIZE, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    out, top, total = _add_span(
        out, top, total, q, positions, edge, stop,
        keys_base, values_base, table, slot_stride, columns,
        scale, True, SOFT_CAP, WINDOW, HEAD_SIZE, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    out = out / total[:, None]
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + head)
    num_heads = tl.num_programs(0) * GROUP
    out_at = ((flat_tokens * num_heads + heads) * HEAD_SIZE)[:, None] + columns[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=fits)


def list_tiles(
    requests: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, tokens: int
) -> np.ndarray:
    """int32 [tiles, 2]: request and the first of its query tokens, for tiles of `tokens` tokens of
    the `requests` (indexes into the lengths), the longest context first."""
    counts = -(-query_lens[requests] // tokens)
    owners = np.repeat(requests, counts)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = places * tokens
    contexts = (seq_lens - query_lens)[owners] + firsts
    order = np.argsort(-contexts, kind="stable")
    return np.stack((owners, firsts), 1)[order].astype(np.int32)


def prefill_launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: DeviceTables,
    listed: Tensor,
    params: AttentionParams,
    scales: KVScales | None,
    *,
    block_size: int,
    tiles: PrefillTiles,
) -> Launch:
    """What writes out [T, H, D] for the tokens of the tiles `listed` (int32 [tiles, 2], by
    `list_tiles`). q [T, H, D] has rows of D elements in a row."""
    assert q.stride(2) == 1 and cache.stride(2) == params.head_size and cache.stride(3) == 1
    keys, values = cache.unbind()
    given = {
        "out_ptr": out,
        "q_ptr": q,
        "keys_ptr": keys,
        "values_ptr": values,
        "tiles_ptr": listed,
        "query_start_ptr": tables.query_start_loc,
        "seq_lens_ptr": tables.seq_lens,
        "table_ptr": tables.block_table,
        "k_scale_ptr": scales.k if scales else None,
        "v_scale_ptr": scales.v if scales else None,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "slot_stride": keys.stride(0),
        "table_stride": tables.block_table.stride(0),
        "SCALE": params.scale,
        "SOFT_CAP": params.soft_cap,
        "WINDOW": params.sliding_window,
        "GROUP": params.num_heads // params.num_kv_heads,
        "HEAD_SIZE": params.head_size,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": padded(params.head_size),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    return _prefill, (params.num_kv_heads, len(listed)), given
