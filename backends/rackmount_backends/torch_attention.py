"""Attention backend "torch": paged attention by `scaled_dot_product_attention`, on any device.

It is the reference for all others, and the default on a CPU. The cache has the layout "slots".
Requests that decode are attended to together: their keys and values are gathered side by side, a
shorter one padded with its own last slot, so that nothing is read that was not written. A request
that computes several tokens, or is alone, is attended to by itself, and where its slots lie in a
row they are read in place.

Shapes: R requests of a group, Q query tokens each, N keys each, H query heads, G key/value heads,
D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry.attention import (
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    KVScales,
)

MAX_GATHERED_KEYS = {"cpu": 2**11, "cuda": 2**16}
"""Keys gathered at once: few enough to stay in the caches of a CPU, or to be no burden on a GPU."""

SMALL_SPAN = 64
"""Keys of padding that cost less than another group."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Requests that one call attends to."""

    tokens: slice | Tensor
    """Places of the R x Q query tokens in the flat batch."""
    slots: slice | Tensor
    """Slots of the R x N keys."""
    num_requests: int
    is_causal: bool
    """The queries are the keys: no mask needed beyond the triangle."""
    mask: Tensor | None
    """[R, 1, Q, N], added to the scores; None where every query sees every key."""


class Plan:
    """A step's requests in groups."""

    def __init__(self, batch: AttentionBatch, context: AttentionContext) -> None:
        num_blocks = -(-int(batch.seq_lens.max(initial=0)) // context.block_size)
        self._context = context
        self._first_tokens = batch.query_start_loc[:-1].astype(np.int64)
        self._query_lens = np.diff(batch.query_start_loc)
        self._seq_lens = batch.seq_lens.astype(np.int64)
        self._blocks = batch.block_table[batch.rows, :num_blocks].astype(np.int64)
        self._groups: dict[int | None, list[Group]] = {}

    def groups(self, window: int | None) -> list[Group]:
        """The groups for layers with this sliding window, made when the first of them asks."""
        if window not in self._groups:
            self._groups[window] = [
                self._group(members, window) for members in self._partition(window)
            ]
        return self._groups[window]

    def _partition(self, window: int | None) -> Iterator[np.ndarray]:
        """Indexes of the requests of each group, ascending.

        Decoding requests are sorted by the keys that they see. A group ends before it would gather
        more than the caches hold, or pad a request to more than twice its size.
        """
        for request in np.flatnonzero(self._query_lens > 1):
            yield np.array([request])
        decoding = np.flatnonzero(self._query_lens == 1)
        spans = self._seq_lens if window is None else np.minimum(self._seq_lens, window)
        order = decoding[np.argsort(-spans[decoding], kind="stable")]
        limit = MAX_GATHERED_KEYS[self._context.device.type]
        start = 0
        for stop in range(1, len(order) + 1):
            longest = spans[order[start]]
            if (
                stop == len(order)
                or (stop - start + 1) * longest > limit
                or longest > 2 * spans[order[stop]] + SMALL_SPAN
            ):
                yield np.sort(order[start:stop])
                start = stop

    def _group(self, members: np.ndarray, window: int | None) -> Group:
        """The group of `members`, which have equal numbers of query tokens."""
        query_len = int(self._query_lens[members[0]])
        stops = self._seq_lens[members, np.newaxis]
        starts = np.zeros_like(stops)
        if window is not None:
            starts = np.maximum(stops - query_len - window + 1, 0)
        num_keys = int((stops - starts).max())
        keys = starts + np.arange(num_keys)
        places = self._first_tokens[members, np.newaxis] + np.arange(query_len)
        is_causal = 1 < query_len == int(stops[0, 0]) and (window is None or window >= query_len)
        return Group(
            tokens=self._index(places.ravel()),
            slots=self._index(self._slots(members, np.minimum(keys, stops - 1)).ravel()),
            num_requests=len(members),
            is_causal=is_causal,
            mask=None if is_causal else self._mask(keys, stops, query_len, window),
        )

    def _slots(self, members: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots of the members' tokens at `positions`, both [R, N]."""
        blocks, offsets = np.divmod(positions, self._context.block_size)
        table = self._blocks[members]
        return np.take_along_axis(table, blocks, 1) * self._context.block_size + offsets

    def _mask(
        self, keys: np.ndarray, stops: np.ndarray, query_len: int, window: int | None
    ) -> Tensor | None:
        """What to add to the scores of keys at positions [R, N] for the last `query_len` tokens
        before `stops` [R, 1]. A padded key lies after every query, so it is never seen."""
        queries = (stops + np.arange(-query_len, 0))[..., np.newaxis]
        hidden = keys[:, np.newaxis] > queries
        if window is not None:
            hidden |= keys[:, np.newaxis] <= queries - window
        if not hidden.any():
            return None
        where = torch.from_numpy(hidden).unsqueeze(1).to(self._context.device)
        zeros = torch.zeros(where.shape, dtype=self._context.dtype, device=where.device)
        return zeros.masked_fill_(where, float("-inf"))

    def _index(self, places: np.ndarray) -> slice | Tensor:
        """Ascending neighbours as a slice, others as a tensor on the device."""
        first, last = int(places[0]), int(places[-1])
        if last - first == len(places) - 1 and (np.diff(places) == 1).all():
            return slice(first, last + 1)
        return torch.from_numpy(places).to(self._context.device)


class TorchAttention:
    """See `rackmount_registry.attention.AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        self._workspace = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Copies what the groups are made from."""
        return Plan(batch, self._context)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: Plan,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each request's cached tokens -> [T, H, D]. What an
        FP8 cache stands for is computed with in float32."""
        groups = plan.groups(params.sliding_window)
        if len(groups) == 1:
            return self._attend(q, cache, groups[0], params, scales)
        out = q.new_empty(q.shape)
        for group in groups:
            out[group.tokens] = self._attend(q[group.tokens], cache, group, params, scales)
        return out

    def _attend(
        self,
        q: Tensor,
        cache: Tensor,
        group: Group,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        """q [R Q, H, D] of one group -> [R Q, H, D]."""
        num_kv_heads, size, mask = params.num_kv_heads, params.head_size, group.mask
        dtype, gathered = q.dtype, self._gather(cache, group.slots)
        if scales is not None:
            q = q.to(torch.promote_types(dtype, torch.float32))
            gathered = scales.widen(gathered, q.dtype)
            mask = None if mask is None else mask.to(q.dtype)
        keys, values = (
            t.view(group.num_requests, -1, num_kv_heads, size).transpose(1, 2) for t in gathered
        )
        # A single query's heads that share a key head take the place of its tokens.
        decoding = len(q) == group.num_requests
        if decoding:
            rows = q.reshape(group.num_requests, num_kv_heads, -1, size)
        else:
            rows = q.view(group.num_requests, -1, params.num_heads, size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rows,
            keys,
            values,
            attn_mask=mask,
            is_causal=group.is_causal,
            scale=params.scale,
            enable_gqa=not decoding,
        )
        return (out if decoding else out.transpose(1, 2)).reshape(q.shape).to(dtype)

    def _gather(self, cache: Tensor, slots: slice | Tensor) -> Tensor:
        """Keys and values [2, R N, G, D]: a view of the cache, or copies in the workspace, which
        last until the next call."""
        if isinstance(slots, slice):
            return cache[:, slots]
        shape = (2, len(slots), *cache.shape[2:])
        if self._workspace.dtype != cache.dtype or self._workspace.numel() < prod(shape):
            self._workspace = cache.new_empty(prod(shape))
        gathered = self._workspace[: prod(shape)].view(shape)
        for source, target in zip(cache, gathered, strict=True):
            torch.index_select(source, 0, slots, out=target)
        return gathered
