"""Decoding: one query token per request, its context shared out among programs.

The work is cut on the device, by the lengths that it finds there, so that a captured launch fits
whatever lengths it is replayed with: the tiles of keys of all requests, one request after the
other, are cut into shares of the same size, wherever requests begin (stream-K, arXiv 2301.03598).
So all programs end together, in one wave. A request that lies in one share is written out at once.
Otherwise the program that ends last merges its parts, in their order, so that results do not depend
on which one that is. They do depend, in their last bits, on where shares end, and so on the lengths
of the requests before.

There is one compiled kernel for each kind of layer, whatever the number of requests: every program
looks at as many lengths as the engine may have requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rackmount_backends.triton_attention.online_softmax import (
    HIDDEN,
    add_values,
    block_ids,
    call_slots,
    fit_queries,
    load_slots,
    weigh,
    widen_pairs,
)
from rackmount_backends.triton_attention.tiles import DecodeTiles, padded
from rackmount_backends.triton_ops.operation import Launch
from rackmount_registry.attention import AttentionParams, DeviceTables, KVScales
from rackmount_registry.device.launch import launch_options

TILES_TO_MERGE = tl.constexpr(8)
"""Parts of a request that are merged in the time in which a program meets a tile of keys."""
MERGED_AT_ONCE = 8192
"""Partial sums in registers while parts are merged."""
MOST_MERGED = 12
"""Parts at once: the kernel is unrolled over them."""


@triton.jit
def _share_of(tiles, longest, num_programs):
    """Tiles of a share: all `tiles` over the programs, but of a long request so many that meeting
    a share takes no less than merging all of them."""
    least = tl.sqrt(longest.to(tl.float32) / TILES_TO_MERGE)
    return tl.maximum(tl.cdiv(tiles, num_programs), tl.ceil(least).to(tl.int32))


@triton.jit
def _request(member, requests_ptr, query_start_ptr, seq_lens_ptr, WINDOW: tl.constexpr):
    """Index, query token, and its keys' begin and end, of one of the launch's requests."""
    request = tl.load(requests_ptr + member)
    token = tl.load(query_start_ptr + request)
    seq_len = tl.load(seq_lens_ptr + request)
    begin = seq_len * 0
    if WINDOW is not None:
        begin = tl.maximum(seq_len - WINDOW, 0)
    return request, token, begin, seq_len


@triton.jit(do_not_specialize=["num_requests", "num_programs"])
def _decode(
    out_ptr, q_ptr, keys_ptr,
    values_ptr,  # those of an FP8 cache are int16, of `PAIR` 2 each
    partial_ptr,  # float32 [2 * num_programs, H, D]: mean values of a part; see `_merge`
    level_ptr,  # float32 [2 * num_programs, H]: log2 of the sum of its weights
    ended_ptr,  # int32 [R, G]: parts that ended, 0 between launches
    requests_ptr,  # int32 [num_requests]: indexes into the tables
    query_start_ptr, seq_lens_ptr, table_ptr,
    k_scale_ptr, v_scale_ptr,  # float32 [G] of an FP8 cache, or None
    num_requests, num_programs, q_token_stride, q_head_stride, slot_stride, table_stride,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    program = tl.program_id(1)

    # Lengths and tables are older than the layer's product: what came before a product is complete
    # when a kernel after it starts (see `rackmount_registry.device.launch`): none waits for them.
    if num_requests == 1:
        # No sums over lengths, which a short step would have to wait for; the result is theirs.
        length = tl.load(seq_lens_ptr + tl.load(requests_ptr))
        if WINDOW is not None:
            length = tl.minimum(length, WINDOW)
        num_tiles = tl.cdiv(length, BLOCK_N)
        share = _share_of(num_tiles, num_tiles, num_programs)
        start, member = program * 0, program * 0
    else:
        members = tl.arange(0, BLOCK_R)
        is_member = members < num_requests
        requests = tl.load(requests_ptr + members, mask=is_member, other=0)
        lengths = tl.load(seq_lens_ptr + requests, mask=is_member, other=0)
        if WINDOW is not None:
            lengths = tl.minimum(lengths, WINDOW)
        tiles = (lengths + BLOCK_N - 1) // BLOCK_N
        num_tiles = tl.sum(tiles, 0)
        share = _share_of(num_tiles, tl.max(tiles, 0), num_programs)
        before = tl.cumsum(tiles, 0) <= program * share
        start = tl.sum(tl.where(before, tiles, 0), 0)  # the request's first tile
        member = tl.sum(before.to(tl.int32), 0)
    first = program * share
    last = tl.minimum(first + share, num_tiles)
    if first >= last:
        return

    columns = tl.arange(0, BLOCK_D)
    keys_base = keys_ptr + head * HEAD_SIZE
    values_base = values_ptr + head * (HEAD_SIZE // PAIR)
    rows = tl.arange(0, BLOCK_H)
    heads = head * GROUP + rows
    num_heads = tl.num_programs(0) * GROUP
    fits = (rows < GROUP)[:, None] & (columns < HEAD_SIZE)[None, :]
    request, token, begin, seq_len = _request(
        member, requests_ptr, query_start_ptr, seq_lens_ptr, WINDOW
    )
    offsets = tl.arange(0, BLOCK_N)
    at = begin + (first - start) * BLOCK_N
    blocks = _first_blocks(table_ptr, request, table_stride, at, seq_len, BLOCK_SIZE, BLOCK_N)
    if PDL:
        # All but the newest token's are there already; that one's is written to L2, too.
        places = tl.minimum(at + offsets, seq_len - 1)
        call_slots(keys_base, blocks, places, slot_stride, BLOCK_SIZE, HEAD_SIZE)
        call_slots(values_base, blocks, places, slot_stride // PAIR, BLOCK_SIZE, HEAD_SIZE // PAIR)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    now = first
    while now < last:
        end = start + tl.cdiv(seq_len - begin, BLOCK_N)
        until = tl.minimum(end, last)
        # What is needed of the next request is on its way while this one's keys are met.
        following = tl.minimum(member + 1, num_requests - 1)
        its_request, its_token, its_begin, its_len = _request(
            following, requests_ptr, query_start_ptr, seq_lens_ptr, WINDOW
        )
        q = tl.load(
            q_ptr + token.to(tl.int64) * q_token_stride
            + heads[:, None] * q_head_stride + columns[None, :],
            mask=fits,
            other=0.0,
        )  # fmt: skip
        out, level = _meet(
            q, keys_base, values_base, table_ptr + request.to(tl.int64) * table_stride, blocks,
            k_scale_ptr, v_scale_ptr, head, begin + (now - start) * BLOCK_N,
            tl.minimum(begin + (until - start) * BLOCK_N, seq_len), slot_stride,
            SCALE, SOFT_CAP, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, PAIR,
        )  # fmt: skip
        blocks = _first_blocks(
            table_ptr, its_request, table_stride, its_begin, its_len, BLOCK_SIZE, BLOCK_N
        )
        out_base = out_ptr + token.to(tl.int64) * (num_heads * HEAD_SIZE)
        inner = heads[:, None] * HEAD_SIZE + columns[None, :]
        if until > now:  # a request may have no token
            if (start >= first) & (end <= last):
                tl.store(out_base + inner, out.to(out_ptr.dtype.element_ty), mask=fits)
            else:
                slot = 2 * program + (start >= first)
                tl.store(partial_ptr + slot * num_heads * HEAD_SIZE + inner, out, mask=fits)
                tl.store(level_ptr + slot * num_heads + heads, level, mask=rows < GROUP)
                ended = ended_ptr + member * tl.num_programs(0) + head
                parts = (end - 1) // share - start // share + 1
                tl.debug_barrier()  # all of the above comes before the count
                if tl.atomic_add(ended, 1, sem="acq_rel") == parts - 1:
                    tl.store(ended, 0)
                    _merge(
                        out_base, partial_ptr, level_ptr, start // share, parts, head * GROUP,
                        num_heads, GROUP, HEAD_SIZE, BLOCK_G, BLOCK_D, BLOCK_S,
                    )  # fmt: skip
        now, start, member = until, end, following
        request, token, begin, seq_len = its_request, its_token, its_begin, its_len


@triton.jit
def _first_blocks(
    table_ptr, request, table_stride, start, seq_len, BLOCK_SIZE: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Blocks of a request's tokens `start` to `start + N - 1`, the last ones more than once where
    it is shorter; if it has no tokens, any."""
    places = tl.maximum(tl.minimum(start + tl.arange(0, N), seq_len - 1), 0)
    return block_ids(table_ptr + request.to(tl.int64) * table_stride, places, BLOCK_SIZE)


@triton.jit
def _meet(
    q, keys_base, values_base, table, blocks, k_scale_ptr, v_scale_ptr, head, start, stop,
    slot_stride, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Mean values [M, D] over the tokens `start` to `stop - 1` of a sequence, for q [M, D], and
    log2 of the sum of their weights [M]. `blocks` [N] are of the first tile."""
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    offsets, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_D // PAIR)
    scale = SCALE
    if k_scale_ptr is not None:
        q, power = fit_queries(q)
        scale = power * tl.load(k_scale_ptr + head) * SCALE
    out = tl.zeros([BLOCK_H, BLOCK_D // PAIR], tl.float32)  # of the even columns, if of pairs
    odd_out = out
    top = tl.full([BLOCK_H], HIDDEN, tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # of weights, added up across warps once
    for at in range(start, stop, BLOCK_N):
        places = tl.minimum(at + offsets, stop - 1)
        here = blocks
        # One tile ahead, so that the loads of keys and values wait for no other load.
        blocks = block_ids(table, tl.minimum(at + BLOCK_N + offsets, stop - 1), BLOCK_SIZE)
        keys = load_slots(keys_base, here, places, slot_stride, columns, BLOCK_SIZE, HEAD_SIZE)
        values = load_slots(
            values_base, here, places, slot_stride // PAIR, value_columns, BLOCK_SIZE,
            HEAD_SIZE // PAIR,
        )  # fmt: skip
        seen = (at + offsets < stop)[None, :]
        top, shrink, weights = weigh(top, q, keys, seen, scale, True, SOFT_CAP)
        if PAIR == 2:
            values, odd_values = widen_pairs(values)
            odd_out = add_values(odd_out, shrink, weights, odd_values)
        out = add_values(out, shrink, weights, values)
        sums = sums * shrink[:, None] + weights
    total = tl.sum(sums, 1)
    if PAIR == 2:
        out = tl.interleave(out, odd_out)
    out = out / total[:, None]
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + head)
    return out, top + tl.log2(total)


@triton.jit
def _merge(
    out_base, partial_ptr, level_ptr, first, count, first_head, num_heads,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Writes the mean values over the parts of a request, for one key head's query heads. They are
    of the programs `first` to `first + count - 1`: each has two places, one for a request that it
    goes on with and one for a request that it begins, as only the first does. The loads go past the
    first cache, which does not see other multiprocessors' stores."""
    columns = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, BLOCK_G)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_G], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(0, count, BLOCK_S):
        # One by one, but all on their way at once: nothing has to change threads.
        levels, partials = (), ()
        for part in tl.static_range(BLOCK_S):
            slot = 2 * (first + start + part) + (start + part == 0)
            rows = slot * num_heads + first_head + heads
            fits = (start + part < count) & (heads < GROUP)
            level = tl.load(level_ptr + rows, mask=fits, other=HIDDEN, cache_modifier=".cg")
            levels += (level,)  # type: ignore[assignment]  # a tuple of no fixed length
            at = partial_ptr + rows[:, None] * HEAD_SIZE + columns[None, :]
            fits = fits[:, None] & (columns < HEAD_SIZE)[None, :]
            partial = tl.load(at, mask=fits, other=0.0, cache_modifier=".cg")
            partials += (partial,)  # type: ignore[assignment]
        new_top = top
        for part in tl.static_range(BLOCK_S):
            new_top = tl.maximum(new_top, levels[part])
        shrink = tl.exp2(top - new_top)
        total *= shrink
        out *= shrink[:, None]
        for part in tl.static_range(BLOCK_S):
            weight = tl.exp2(levels[part] - new_top)
            total += weight
            out += partials[part] * weight[:, None]
        top = new_top
    tl.store(
        out_base + (first_head + heads)[:, None] * HEAD_SIZE + columns[None, :],
        (out / total[:, None]).to(out_base.dtype.element_ty),
        mask=(heads < GROUP)[:, None] & (columns < HEAD_SIZE)[None, :],
    )


class Workspace:
    """Where parts are left for the merge; one launch at a time uses it."""

    def __init__(self, partials: int, levels: int, counts: int, device: torch.device) -> None:
        """So many numbers of each kind at most."""
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.levels = torch.empty(levels, dtype=torch.float32, device=device)
        self.ended = torch.zeros(counts, dtype=torch.int32, device=device)


def decode_launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: DeviceTables,
    requests: Tensor,
    params: AttentionParams,
    scales: KVScales | None,
    *,
    max_requests: int,
    block_size: int,
    workspace: Workspace,
    programs: int,
    tiles: DecodeTiles,
    registers: int,
) -> Launch:
    """What writes out [T, H, D] for the one token of each of the `requests` (int32 [R']), which
    were on the device before the layer's product. q [T, H, D] has rows of D elements in a row."""
    assert len(requests) <= max_requests
    assert q.stride(2) == 1 and cache.stride(2) == params.head_size and cache.stride(3) == 1
    keys, values = cache.unbind()
    group = params.num_heads // params.num_kv_heads
    block_d, block_g = padded(params.head_size), padded(group)
    given = {
        "out_ptr": out,
        "q_ptr": q,
        "keys_ptr": keys,
        "values_ptr": values if scales is None else values.view(torch.int16),
        "partial_ptr": workspace.partials,
        "level_ptr": workspace.levels,
        "ended_ptr": workspace.ended,
        "requests_ptr": requests,
        "query_start_ptr": tables.query_start_loc,
        "seq_lens_ptr": tables.seq_lens,
        "table_ptr": tables.block_table,
        "k_scale_ptr": scales.k if scales else None,
        "v_scale_ptr": scales.v if scales else None,
        "num_requests": len(requests),
        "num_programs": programs,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "slot_stride": keys.stride(0),
        "table_stride": tables.block_table.stride(0),
        "SCALE": params.scale,
        "SOFT_CAP": params.soft_cap,
        "WINDOW": params.sliding_window,
        "GROUP": group,
        "HEAD_SIZE": params.head_size,
        "BLOCK_SIZE": block_size,
        "BLOCK_R": max(16, padded(max_requests)),
        "BLOCK_H": max(16, block_g),
        "BLOCK_G": block_g,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": block_d,
        "BLOCK_S": min(MOST_MERGED, max(1, MERGED_AT_ONCE // (block_g * block_d))),
        "PAIR": 1 if scales is None else 2,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "maxnreg": registers,
        **launch_options(q.device),
    }
    return _decode, (params.num_kv_heads, programs), given
