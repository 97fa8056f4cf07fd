"""FlashInfer's wrappers behind the contract: `plan` on the host, one wrapper per kind of layer.

A prefill wrapper serves steps with more than one token for some request, a decode wrapper those
with one for each, and static steps have a decode wrapper for each R, whose tables stay in place:
it is planned at the capture, and renewed before each replay. FlashInfer plans by splitting the
keys of long requests over the GPU, into its own pinned memory, from where they are copied; a plan
waits until the copies of the one before are done.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from rackmount_backends.flashinfer.pages import Pages, host_tensor, list_pages
from rackmount_registry.attention import (
    FP8,
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    KVScales,
)

LARGEST_TILE = 128
"""Query rows of one thread block, at most."""

STATIC_PLAN_BYTES = 2**20
"""For the plan of a static step: some tens of bytes per request."""

Plan: TypeAlias = Mapping[AttentionParams, Any]
"""The planned wrapper of each kind of layer; empty for a step without requests."""


class FlashInfer:
    """See `rackmount_registry.attention.AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        device, size = context.device, context.max_num_seqs
        gpu = torch.cuda.get_device_properties(device)
        self._context = context
        num_bytes = max(
            workspace_bytes(layer, size, gpu.multi_processor_count) for layer in context.layers
        )
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # "fa3" is of Hopper alone, and does not split the keys of a sequence, as decoding must. An
        # FP8 cache it reads with FP8 queries alone.
        hopper = (gpu.major, gpu.minor) == (9, 0)
        prefill = "fa3" if hopper and context.kv_dtype != FP8 else "fa2"
        self._prefill = {
            layer: BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=prefill)
            for layer in context.layers
        }
        self._decode = {
            layer: BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
            for layer in context.layers
        }
        self._static: dict[int, dict[AttentionParams, Any]] = {}
        # Static steps of all sizes share these: each is planned just before it runs.
        self._static_plans = {
            layer: torch.empty(STATIC_PLAN_BYTES, dtype=torch.uint8, device=device)
            for layer in context.layers
        }
        self._indptr, self._indices, self._last_lens = (
            torch.empty(length, dtype=torch.int32, device=device)
            for length in (size + 1, size * context.max_blocks, size)
        )
        self._copied: torch.cuda.Event | None = None
        self._on_host: dict[KVScales, tuple[float, float]] = {}

    def plan(self, batch: AttentionBatch) -> Plan:
        """Splits the step's work and sends the tables to the device."""
        if len(batch.seq_lens) == 0:
            return {}
        if self._copied is not None:
            self._copied.synchronize()
        pages = list_pages(batch, self._context.block_size)
        if batch.is_static:
            plan = self._plan_static(pages)
        elif batch.query_start_loc[-1] == len(batch.seq_lens):
            plan = self._plan_decode(pages, self._decode)
        else:
            plan = self._plan_prefill(batch, pages)
        self._copied = torch.cuda.current_stream(self._context.device).record_event()
        return plan

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: Plan,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each request's cached tokens -> [T, H, D]."""
        out = q.new_empty(q.shape)
        if len(q):
            shape = (2, -1, self._context.block_size, params.num_kv_heads, params.head_size)
            k_scale, v_scale = (None, None) if scales is None else self._numbers(scales)
            pages = cache.view(shape).unbind()
            plan[params].run(q, pages, out=out, k_scale=k_scale, v_scale=v_scale)
        return out

    def _numbers(self, scales: KVScales) -> tuple[float, float]:
        """The layer's scales, alike for all its heads, as FlashInfer takes them. The device is
        waited for once, when the layer first runs: before any capture."""
        if scales not in self._on_host:
            self._on_host[scales] = float(scales.k[0]), float(scales.v[0])
        return self._on_host[scales]

    def _plan_prefill(self, batch: AttentionBatch, pages: Pages) -> Plan:
        query_start_loc = host_tensor(len(batch.query_start_loc))
        query_start_loc.numpy()[:] = batch.query_start_loc
        longest = int(np.diff(batch.query_start_loc).max())
        for layer, wrapper in self._prefill.items():
            wrapper.plan(
                query_start_loc,
                pages.indptr,
                pages.indices,
                pages.last_lens,
                head_dim_qk=layer.head_size,
                causal=True,
                max_token_per_sequence=longest,
                **self._fixed(layer),
            )
        return self._prefill

    def _plan_decode(self, pages: Pages, wrappers: Plan) -> Plan:
        for layer, wrapper in wrappers.items():
            wrapper.plan(
                pages.indptr,
                pages.indices,
                pages.last_lens,
                head_dim=layer.head_size,
                **self._fixed(layer),
            )
        return wrappers

    def _plan_static(self, pages: Pages) -> Plan:
        size = len(pages.last_lens)
        if size not in self._static:
            self._static[size] = {
                layer: self._static_wrapper(layer, size) for layer in self._context.layers
            }
            return self._plan_decode(pages, self._static[size])
        self._indptr[: size + 1].copy_(pages.indptr, non_blocking=True)
        self._indices[: len(pages.indices)].copy_(pages.indices, non_blocking=True)
        self._last_lens[:size].copy_(pages.last_lens, non_blocking=True)
        for layer, wrapper in self._static[size].items():
            # `wrapper.plan` would wait for the copy of the indices.
            fast_decode_plan(
                wrapper,
                pages.indptr,
                pages.indices,
                pages.last_lens,
                head_dim=layer.head_size,
                **self._fixed(layer),
            )
        return self._static[size]

    def _static_wrapper(self, layer: AttentionParams, size: int) -> Any:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr[: size + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_lens[:size],
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._workspace, self._static_plans[layer])
        return wrapper

    def _fixed(self, layer: AttentionParams) -> dict[str, Any]:
        """Arguments of every plan that follow from the layer."""
        window = layer.sliding_window
        return {
            "num_qo_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "page_size": self._context.block_size,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": layer.soft_cap or 0.0,
            "sm_scale": layer.scale,
            "q_data_type": self._context.dtype,
            "kv_data_type": self._context.kv_dtype,
        }


def workspace_bytes(layer: AttentionParams, max_num_seqs: int, num_sms: int) -> int:
    """Most that partial results of split requests take: a float32 row of D, and a sum, per query
    head and query row of every tile.

    After `PrefillPlan` of FlashInfer 0.6.14 (attention/scheduler.cuh). It splits up to two tiles
    per multiprocessor over the key heads; a static step has room for a tile per request, too.
    """
    group = layer.num_heads // layer.num_kv_heads
    split = 2 * num_sms // layer.num_kv_heads
    tile = next(rows for rows in (16, 64, LARGEST_TILE) if group <= rows or rows == LARGEST_TILE)
    static = max(split, -(-max_num_seqs * group // tile) + max_num_seqs - 1)
    rows = max(split * LARGEST_TILE, static * tile)
    return layer.num_heads * rows * (layer.head_size + 1) * 4 + 32  # two alignments to 16
