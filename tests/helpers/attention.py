"""Steps for attention backends: any requests on a paged cache that is poisoned where unwritten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rackmount_registry.attention import (
    CACHE_LAYOUTS,
    FP8,
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    CacheSpec,
    DeviceTables,
    KVScales,
    narrow,
)
from rackmount_registry.step import attend_causally

PARAMS = AttentionParams(num_heads=6, num_kv_heads=2, head_size=8, scale=0.3)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The last `query_len` tokens of a sequence of `seq_len` are new."""

    query_len: int
    seq_len: int
    shared_blocks: int = 0
    """Leading blocks, all computed, that are the first request's own."""


def decoding(*seq_lens: int) -> list[Request]:
    """One new token each."""
    return [Request(query_len=1, seq_len=n) for n in seq_lens]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step on a backend with a cache that holds NaN wherever no token was written."""

    backend: AttentionBackend
    batch: AttentionBatch
    params: AttentionParams
    cache: Tensor
    q: Tensor
    sequences: list[tuple[Tensor, Tensor]]
    """Keys and values [seq_len, G, D] of each request, as the cache holds them."""
    scales: KVScales | None = None
    """Of an FP8 cache."""

    def run(self) -> Tensor:
        """What the backend makes of it, which may not look at the host's table after planning."""
        plan = self.backend.plan(
            replace(self.batch, block_table=(table := self.batch.block_table.copy()))
        )
        table.fill(-1)
        return self.backend.run(self.q, self.cache, plan, self.params, self.scales)

    def expected(self) -> Tensor:
        """By the definition, in float64 on the CPU."""
        queries = self.q.double().cpu().split(np.diff(self.batch.query_start_loc).tolist())
        scales = self.scales and KVScales(k=self.scales.k.cpu(), v=self.scales.v.cpu())
        outs = []
        for q, pair in zip(queries, self.sequences, strict=True):
            kv = torch.stack(pair)
            kv = scales.widen(kv, torch.float64) if scales else kv.double()
            outs.append(attend_causally(q, *kv, self.params))
        return torch.cat(outs) if outs else self.q.double().cpu()


def make_case(
    factory: Callable[[AttentionContext], AttentionBackend],
    requests: Sequence[Request],
    *,
    params: AttentionParams = PARAMS,
    dtype: torch.dtype = torch.float64,
    block_size: int = 4,
    scattered: bool = True,
    seed: int = 0,
    device: str = "cpu",
    kv_scales: tuple[list[float], list[float]] | None = None,
) -> Case:
    """The requests on blocks in random order, or one after another. `kv_scales` of keys and values
    make it an FP8 cache: one for all heads, or one for each.

    The tables on the device name a block of NaN behind a sequence's own.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    table, rows, poison = _lay_out(requests, block_size, scattered, rng)
    heads = (params.num_kv_heads, params.head_size)
    kv_dtype, scales = dtype, None
    if kv_scales is not None:
        k_scale, v_scale = (torch.tensor(each).expand(heads[0]).contiguous() for each in kv_scales)
        kv_dtype, scales = FP8, KVScales(k=k_scale, v=v_scale)
    spec = CacheSpec(num_kv_heads=heads[0], head_size=heads[1], dtype=kv_dtype)
    num_slots = (max(table.max(initial=0), poison) + 1) * block_size
    shape = CACHE_LAYOUTS["slots"].shape(spec, num_slots)
    cache = torch.full(shape, float("nan"), dtype=kv_dtype)
    sequences: list[tuple[Tensor, Tensor]] = []
    for request, row in zip(requests, rows, strict=True):
        k, v = _random(generator, 2, request.seq_len, *heads).to(dtype)
        if scales is not None:
            k, v = narrow(k, scales.k), narrow(v, scales.v)
        if tokens := request.shared_blocks * block_size:
            k[:tokens], v[:tokens] = (t[:tokens] for t in sequences[0])
        blocks, offsets = np.divmod(np.arange(request.seq_len), block_size)
        slots = torch.from_numpy(table[row, blocks].astype(np.int64) * block_size + offsets)
        cache[0, slots], cache[1, slots] = k, v
        sequences.append((k, v))
    query_start_loc = np.cumsum([0, *(r.query_len for r in requests)], dtype=np.int32)
    seq_lens = np.array([r.seq_len for r in requests], np.int32)
    known = np.where(table < 0, poison, table)[rows].astype(np.int32)
    q = _random(generator, sum(r.query_len for r in requests), params.num_heads, heads[1])
    context = AttentionContext(
        layers=frozenset({params}),
        block_size=block_size,
        max_num_seqs=len(requests) + 2,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        device=torch.device(device),
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return Case(
        backend=factory(context),
        params=params,
        cache=cache.to(device),
        q=q.to(dtype).to(device),
        sequences=sequences,
        scales=scales and KVScales(k=scales.k.to(device), v=scales.v.to(device)),
        batch=AttentionBatch(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            rows=rows,
            block_table=table,
            on_device=DeviceTables(
                query_start_loc=torch.from_numpy(query_start_loc).to(device),
                seq_lens=torch.from_numpy(seq_lens).to(device),
                block_table=torch.from_numpy(known).to(device),
            ),
        ),
    )


def _lay_out(
    requests: Sequence[Request], block_size: int, scattered: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int]:
    """The host's table, -1 behind a sequence's blocks; the requests' rows; a block of nobody."""
    needs = [-(-r.seq_len // block_size) for r in requests]
    num_blocks = sum(needs) + 3
    free = iter(rng.permutation(num_blocks) if scattered else np.arange(num_blocks))
    rows = rng.permutation(len(requests) + 2)[: len(requests)].astype(np.int32)
    table = np.full((len(requests) + 2, max(needs, default=0) + 1), -1, np.int32)
    for request, row, need in zip(requests, rows, needs, strict=True):
        shared = request.shared_blocks
        table[row, :shared] = table[rows[0], :shared]
        table[row, shared:need] = [next(free) for _ in range(need - shared)]
    return table, rows, int(next(free))


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
