"""The torch backend against the definition of causal attention, on batches of any make-up."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rackmount_backends.torch_attention import MAX_GATHERED_KEYS, TorchAttention
from rackmount_registry.attention import (
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    CacheSpec,
)
from rackmount_registry.step import attend_causally

BLOCK_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """The last `query_len` tokens of a sequence of `seq_len` are new."""

    query_len: int
    seq_len: int
    shared_blocks: int = 0
    """Leading blocks, all computed, that are the first request's own."""


DECODE_LONG = Request(query_len=1, seq_len=67)
DECODE_SHORT = Request(query_len=1, seq_len=1)
PREFILL = Request(query_len=19, seq_len=19)
CHUNK = Request(query_len=7, seq_len=40)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step on a backend with a cache that holds NaN wherever no token was written."""

    backend: TorchAttention
    batch: AttentionBatch
    params: AttentionParams
    cache: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    sequences: list[tuple[Tensor, Tensor]]
    """Keys and values [seq_len, G, D] of each request."""

    def run(self) -> Tensor:
        cache = self.cache.clone()
        plan = self.backend.plan(self.batch)
        self.batch.block_table.fill(-1)  # a plan may not look at it again
        self.backend.write(cache, self.k, self.v, plan)
        return self.backend.run(self.q, cache, plan, self.params)

    def expected(self) -> Tensor:
        queries = self.q.double().cpu().split(np.diff(self.batch.query_start_loc).tolist())
        outs = [
            attend_causally(q, k.double(), v.double(), self.params)
            for q, (k, v) in zip(queries, self.sequences, strict=True)
        ]
        return torch.cat(outs) if outs else self.q.double()


def make_case(
    requests: list[Request],
    *,
    params: AttentionParams | None = None,
    dtype: torch.dtype = torch.float64,
    block_size: int = BLOCK_SIZE,
    scattered: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """The requests on blocks in random order, or one after another."""
    params = params or AttentionParams(num_heads=6, num_kv_heads=2, head_size=8, scale=0.3)
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-r.seq_len // block_size) for r in requests]
    num_blocks = sum(needs) + 3
    free = iter(rng.permutation(num_blocks) if scattered else np.arange(num_blocks))
    heads = (params.num_kv_heads, params.head_size)
    context = AttentionContext(
        block_size=block_size,
        max_num_seqs=len(requests) + 2,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        device=torch.device(device),
        dtype=dtype,
    )
    backend = TorchAttention(context)
    spec = CacheSpec(num_kv_heads=heads[0], head_size=heads[1], dtype=dtype)
    cache = torch.full(backend.cache_shape(spec, num_blocks), float("nan"), dtype=dtype)
    rows = rng.permutation(len(requests) + 2)[: len(requests)].astype(np.int32)
    table = np.full((len(requests) + 2, max(needs, default=0) + 1), -1, np.int32)
    sequences: list[tuple[Tensor, Tensor]] = []
    fresh, slot_mapping = [], []
    for request, row, need in zip(requests, rows, needs, strict=True):
        k, v = torch.randn(2, request.seq_len, *heads, generator=generator, dtype=torch.float64).to(
            dtype
        )
        shared = request.shared_blocks
        if shared:
            table[row, :shared] = table[rows[0], :shared]
            tokens = shared * block_size
            k[:tokens], v[:tokens] = (t[:tokens] for t in sequences[0])
        table[row, shared:need] = [next(free) for _ in range(need - shared)]
        positions = np.arange(request.seq_len)
        slots = torch.from_numpy(
            table[row, positions // block_size].astype(np.int64) * block_size
            + positions % block_size
        )
        old = request.seq_len - request.query_len
        cache[0, slots[:old]], cache[1, slots[:old]] = k[:old], v[:old]
        sequences.append((k, v))
        fresh.append((k[old:], v[old:]))
        slot_mapping.append(slots[old:])
    num_tokens = sum(r.query_len for r in requests)
    q = torch.randn(
        num_tokens, params.num_heads, heads[1], generator=generator, dtype=torch.float64
    )
    empty = torch.empty(0, *heads, dtype=dtype)
    return Case(
        backend=backend,
        params=params,
        cache=cache.to(device),
        q=q.to(dtype).to(device),
        k=torch.cat([empty, *(k for k, _ in fresh)]).to(device),
        v=torch.cat([empty, *(v for _, v in fresh)]).to(device),
        sequences=sequences,
        batch=AttentionBatch(
            query_start_loc=np.cumsum([0, *(r.query_len for r in requests)], dtype=np.int32),
            seq_lens=np.array([r.seq_len for r in requests], np.int32),
            rows=rows,
            block_table=table,
            slot_mapping=torch.cat([torch.empty(0, dtype=torch.int64), *slot_mapping]).to(device),
        ),
    )


def subset(case: Case, order: list[int]) -> Case:
    """The step of some of its requests, in another order."""
    batch, lengths = case.batch, np.diff(case.batch.query_start_loc)
    tokens = torch.cat(
        [torch.arange(batch.query_start_loc[r], batch.query_start_loc[r + 1]) for r in order]
    )
    return replace(
        case,
        q=case.q[tokens],
        k=case.k[tokens],
        v=case.v[tokens],
        sequences=[case.sequences[r] for r in order],
        batch=replace(
            batch,
            query_start_loc=np.cumsum([0, *lengths[order]], dtype=np.int32),
            seq_lens=batch.seq_lens[order],
            rows=batch.rows[order],
            slot_mapping=batch.slot_mapping[tokens],
        ),
    )


def assert_exact(case: Case) -> None:
    torch.testing.assert_close(case.run(), case.expected(), rtol=0, atol=1e-13)


@st.composite
def request_lists(draw: st.DrawFn) -> list[Request]:
    """Decoding and prefilling requests around block boundaries; some share the first one's
    blocks."""
    requests: list[Request] = []
    for _ in range(draw(st.integers(0, 7))):
        seq_len = max(1, BLOCK_SIZE * draw(st.integers(0, 8)) + draw(st.integers(-1, 1)))
        query_len = draw(st.just(1) | st.integers(1, seq_len))
        computed = seq_len - query_len
        first = requests[0].seq_len - requests[0].query_len if requests else 0
        shared = draw(st.integers(0, min(computed, first) // BLOCK_SIZE))
        requests.append(Request(query_len=query_len, seq_len=seq_len, shared_blocks=shared))
    return requests


@settings(max_examples=200, deadline=None)
@given(
    requests=request_lists(),
    num_kv_heads=st.sampled_from((1, 2, 6)),
    head_size=st.sampled_from((1, 8, 33)),
    window=st.none() | st.integers(1, 20),
    scattered=st.booleans(),
    max_gathered=st.sampled_from((1, 24, 2048)),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_the_definition(
    requests: list[Request],
    num_kv_heads: int,
    head_size: int,
    window: int | None,
    scattered: bool,
    max_gathered: int,
    seed: int,
) -> None:
    params = AttentionParams(
        num_heads=6,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=0.4,
        sliding_window=window,
    )
    with patch.dict(MAX_GATHERED_KEYS, cpu=max_gathered):
        assert_exact(make_case(requests, params=params, scattered=scattered, seed=seed))


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_every_block_size_serves(block_size: int) -> None:
    requests = [DECODE_LONG, PREFILL, CHUNK, DECODE_SHORT]
    assert_exact(make_case(requests, block_size=block_size))


def test_a_step_without_requests_gives_no_rows() -> None:
    case = make_case([])
    assert case.run().shape == (0, 6, 8)


def test_lengths_far_apart_are_not_padded_to_each_other() -> None:
    lengths = [500, 7, 480, 9, 300]
    case = make_case([Request(query_len=1, seq_len=length) for length in lengths])
    groups = case.backend.plan(case.batch).groups(None)
    assert sorted(group.num_requests for group in groups) == [2, 3]
    assert_exact(case)


def test_a_sequence_in_a_row_is_read_in_place() -> None:
    case = make_case([Request(query_len=1, seq_len=33)], scattered=False)
    (group,) = case.backend.plan(case.batch).groups(None)
    assert group.slots == slice(0, 33)
    assert_exact(case)


def test_a_decoding_window_gathers_what_it_sees_and_no_more() -> None:
    params = AttentionParams(num_heads=6, num_kv_heads=2, head_size=8, scale=0.3, sliding_window=5)
    case = make_case([DECODE_LONG, DECODE_LONG], params=params)
    (group,) = case.backend.plan(case.batch).groups(5)
    assert len(group.slots) == 10 and group.mask is None
    assert_exact(case)


def test_layers_of_different_windows_share_a_plan() -> None:
    case = make_case([DECODE_LONG, CHUNK])
    plan = case.backend.plan(case.batch)
    case.backend.write(case.cache, case.k, case.v, plan)
    for window in (3, None, 17):
        layer = replace(case, params=replace(case.params, sliding_window=window))
        out = case.backend.run(case.q, case.cache, plan, layer.params)
        torch.testing.assert_close(out, layer.expected(), rtol=0, atol=1e-13)


def test_what_a_request_gets_does_not_depend_on_its_batch() -> None:
    requests = [DECODE_LONG, PREFILL, DECODE_SHORT, CHUNK]
    case = make_case(requests)
    whole = case.run().split([r.query_len for r in requests])
    for order in ([2], [0, 2], [3, 2, 1, 0], [1, 0, 3]):
        some = subset(make_case(requests), order)
        outs = some.run().split([requests[r].query_len for r in order])
        for request, out in zip(order, outs, strict=True):
            torch.testing.assert_close(out, whole[request], rtol=0, atol=1e-14)


def test_writing_touches_no_other_slot() -> None:
    case = make_case([CHUNK, DECODE_SHORT])
    before, cache = case.cache.clone(), case.cache.clone()
    case.backend.write(cache, case.k, case.v, case.backend.plan(case.batch))
    slots = case.batch.slot_mapping
    assert torch.equal(cache[:, slots], torch.stack((case.k, case.v)))
    cache[:, slots] = before[:, slots]
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0))


def test_views_of_one_projection_are_taken_as_they_come() -> None:
    case = make_case([DECODE_LONG, PREFILL])
    joined = torch.cat((case.q, case.k, case.v), 1)
    q, k, v = joined.split((case.q.shape[1], case.k.shape[1], case.v.shape[1]), 1)
    assert not q.is_contiguous()
    assert_exact(replace(case, q=q, k=k, v=v))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_narrow_dtypes_stay_close_to_the_definition_in_float64(
    dtype: torch.dtype, tolerance: float
) -> None:
    case = make_case([DECODE_LONG, PREFILL, CHUNK, DECODE_SHORT], dtype=dtype)
    out = case.run()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5, 32])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 5e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 2e-3),
    ],
)
def test_a_gpu_gives_the_same(
    dtype: torch.dtype, tolerance: float, num_kv_heads: int, window: int | None
) -> None:
    params = AttentionParams(
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_size=64,
        scale=0.125,
        sliding_window=window,
    )
    alone = [[DECODE_LONG], [PREFILL], [CHUNK]]
    for requests in (*alone, [DECODE_LONG] * 3, [DECODE_LONG, PREFILL, CHUNK, DECODE_SHORT]):
        case = make_case(requests, params=params, dtype=dtype, device="cuda")
        out = case.run().double().cpu()
        torch.testing.assert_close(out, case.expected(), rtol=tolerance, atol=tolerance)
