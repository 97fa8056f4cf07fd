"""The backend: a step goes to the decode kernel, to the prefill kernel, or in part to each.

What any step may launch begins to be compiled, in threads, when the backend is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rackmount_backends.triton_attention.decode import Workspace, decode_launch
from rackmount_backends.triton_attention.prefill import list_tiles, prefill_launch
from rackmount_backends.triton_attention.tiles import (
    DecodeTiles,
    PrefillTiles,
    decode_tiles,
    prefill_tiles,
    registers,
    resident_programs,
)
from rackmount_backends.triton_ops.operation import Launch
from rackmount_registry.attention import (
    CACHE_LAYOUTS,
    FP8,
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    CacheSpec,
    DeviceTables,
    KVScales,
)
from rackmount_registry.device.ahead import AheadCompiler, traits


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """The query tiles of a step, for layers of one group and head size."""

    tiles: PrefillTiles
    listed: Tensor
    """int32 [tiles, 2]: see `list_tiles`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A step's requests by the number of their query tokens."""

    tables: DeviceTables
    decoding: Tensor
    """int32: those of one query token."""
    prefills: dict[tuple[int, int], PrefillPlan]
    """Of the others, by group and head size; empty if there are none."""


class TritonAttention:
    """See `rackmount_registry.attention.AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        on_gpu = context.device.type == "cuda"
        self._capability = torch.cuda.get_device_capability(context.device) if on_gpu else (0, 0)
        self._processors = num_processors(context.device)
        self._all = torch.arange(context.max_num_seqs, dtype=torch.int32, device=context.device)
        places = {
            p: 2 * p.num_heads * max(self._cut(p, n)[1] for n in (1, context.max_num_seqs))
            for p in context.layers
        }
        self._workspace = Workspace(
            partials=max(count * p.head_size for p, count in places.items()),
            levels=max(places.values()),
            counts=max(context.max_num_seqs * p.num_kv_heads for p in context.layers),
            device=context.device,
        )
        self._ahead = AheadCompiler()
        for params in context.layers:
            self._compile(params)

    def _compile(self, params: AttentionParams) -> None:
        """For every step: the shortest and the longest chunk have all tiles that prefill takes, and
        one request and as many as there may be have those of decoding."""
        context, heads, size = self._context, params.num_kv_heads, params.head_size
        spec = CacheSpec(num_kv_heads=heads, head_size=size, dtype=context.kv_dtype)
        shape = CACHE_LAYOUTS["slots"].shape(spec, context.block_size)
        empty = partial(torch.empty, device=context.device)
        cache, scale = empty(shape, dtype=spec.dtype), empty(heads, dtype=torch.float32)
        q = empty(1, params.num_heads, size, dtype=context.dtype)
        scales = KVScales(k=scale, v=scale) if spec.dtype == FP8 else None
        lengths = empty(3, dtype=torch.int32)
        table = empty(2, context.max_blocks, dtype=torch.int32)
        tables = DeviceTables(query_start_loc=lengths, seq_lens=lengths, block_table=table)
        for chunk in (2, max(2, min(context.max_num_batched_tokens, context.max_model_len))):
            starts = np.array([0, 1, 1 + chunk], np.int32)
            batch = AttentionBatch(
                query_start_loc=starts,
                seq_lens=np.diff(starts),
                rows=np.arange(2, dtype=np.int32),
                block_table=np.zeros((2, context.max_blocks), np.int32),
                on_device=tables,
            )
            plan = self.plan(batch)
            for each in (plan, replace(plan, decoding=self._all)):
                for kernel, _, given in self._launches(q, q, cache, each, params, scales):
                    self._ahead.start(kernel, traits(kernel, given), given)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Lists the tiles of what is not decoding; decoding needs the device's tables alone."""
        assert batch.on_device is not None
        query_lens = np.diff(batch.query_start_loc)
        several = np.flatnonzero(query_lens > 1)
        if not len(several):
            return Plan(tables=batch.on_device, decoding=self._all[: len(query_lens)], prefills={})
        single = np.flatnonzero(query_lens == 1).astype(np.int32)
        prefills = {}
        for params in self._context.layers:
            group = params.num_heads // params.num_kv_heads
            if (key := (group, params.head_size)) not in prefills:
                tiles = prefill_tiles(
                    params.head_size,
                    group,
                    int(query_lens.max()),
                    self._context.dtype.itemsize,
                    self._context.kv_dtype.itemsize,
                    self._capability,
                )
                listed = list_tiles(several, query_lens, batch.seq_lens, tiles.block_m // group)
                prefills[key] = PrefillPlan(tiles=tiles, listed=self._upload(listed))
        return Plan(tables=batch.on_device, decoding=self._upload(single), prefills=prefills)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: Plan,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each request's cached tokens -> [T, H, D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._ahead.wait()
        for kernel, grid, given in self._launches(out, q, cache, plan, params, scales):
            kernel[grid](**given)
        return out

    def _launches(
        self,
        out: Tensor,
        q: Tensor,
        cache: Tensor,
        plan: Plan,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Iterator[Launch]:
        """What writes the step's rows of `out`."""
        if plan.prefills:
            prefilling = plan.prefills[params.num_heads // params.num_kv_heads, params.head_size]
            yield prefill_launch(
                out,
                q,
                cache,
                plan.tables,
                prefilling.listed,
                params,
                scales,
                block_size=self._context.block_size,
                tiles=prefilling.tiles,
            )
        if len(plan.decoding):
            tiles, programs, most_registers = self._cut(params, len(plan.decoding))
            yield decode_launch(
                out,
                q,
                cache,
                plan.tables,
                plan.decoding,
                params,
                scales,
                max_requests=self._context.max_num_seqs,
                block_size=self._context.block_size,
                workspace=self._workspace,
                programs=programs,
                tiles=tiles,
                registers=most_registers,
            )

    def _cut(self, params: AttentionParams, num_requests: int) -> tuple[DecodeTiles, int, int]:
        """Of a decode launch: its tiles, programs per key head, which are as many as the GPU holds
        at once, and registers of a thread."""
        heads = params.num_kv_heads
        shape = params.head_size, params.num_heads // heads, self._context.kv_dtype.itemsize
        contexts = num_requests * heads / self._processors
        tiles = decode_tiles(*shape, self._capability, contexts)
        resident = resident_programs(tiles, *shape, self._capability)
        programs = max(1, self._processors * resident // heads)
        return tiles, programs, registers(tiles, resident)

    def _upload(self, array: np.ndarray) -> Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self._context.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._context.device, non_blocking=True)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a CPU counts as one."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
