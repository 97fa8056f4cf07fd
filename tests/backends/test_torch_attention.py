"""The torch backend against the definition of causal attention, on batches of any make-up."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import attention
from tests.helpers.attention import PARAMS, Case, Request, decoding

from rackmount_backends.torch_attention import MAX_GATHERED_KEYS, TorchAttention
from rackmount_registry.attention import AttentionParams

BLOCK_SIZE = 4

DECODE_LONG, DECODE_SHORT = decoding(67, 1)
PREFILL = Request(query_len=19, seq_len=19)
CHUNK = Request(query_len=7, seq_len=40)

make_case = partial(attention.make_case, TorchAttention)


def subset(case: Case, order: list[int]) -> Case:
    """The step of some of its requests, in another order."""
    batch, lengths = case.batch, np.diff(case.batch.query_start_loc)
    tokens = torch.cat(
        [torch.arange(batch.query_start_loc[r], batch.query_start_loc[r + 1]) for r in order]
    )
    return replace(
        case,
        q=case.q[tokens],
        sequences=[case.sequences[r] for r in order],
        batch=replace(
            batch,
            query_start_loc=np.cumsum([0, *lengths[order]], dtype=np.int32),
            seq_lens=batch.seq_lens[order],
            rows=batch.rows[order],
            on_device=None,
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
    case = make_case(decoding(*lengths))
    groups = case.backend.plan(case.batch).groups(None)
    assert sorted(group.num_requests for group in groups) == [2, 3]
    assert_exact(case)


def test_a_sequence_in_a_row_is_read_in_place() -> None:
    case = make_case(decoding(33), scattered=False)
    (group,) = case.backend.plan(case.batch).groups(None)
    assert group.slots == slice(0, 33)
    assert_exact(case)


def test_a_decoding_window_gathers_what_it_sees_and_no_more() -> None:
    params = replace(PARAMS, sliding_window=5)
    case = make_case([DECODE_LONG, DECODE_LONG], params=params)
    (group,) = case.backend.plan(case.batch).groups(5)
    assert len(group.slots) == 10 and group.mask is None
    assert_exact(case)


def test_layers_of_different_windows_share_a_plan() -> None:
    case = make_case([DECODE_LONG, CHUNK])
    plan = case.backend.plan(case.batch)
    for window in (3, None, 17):
        layer = replace(case, params=replace(case.params, sliding_window=window))
        out = case.backend.run(case.q, case.cache, plan, layer.params, None)
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


def test_a_view_of_the_projection_is_taken_as_it_comes() -> None:
    case = make_case([DECODE_LONG, PREFILL])
    q = torch.cat((case.q, torch.full_like(case.q, float("nan"))), 1)[:, : case.q.shape[1]]
    assert not q.is_contiguous()
    assert_exact(replace(case, q=q))


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


@pytest.mark.parametrize("kv_scales", [([0.01], [0.03]), ([0.003, 0.02], [0.5, 0.001])])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("scattered", [True, False])
def test_an_fp8_cache_is_what_it_stands_for(
    scattered: bool,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None,
    kv_scales: tuple[list[float], list[float]],
) -> None:
    params = replace(PARAMS, sliding_window=window)
    for requests in ([DECODE_LONG, PREFILL, CHUNK, DECODE_SHORT], [DECODE_LONG], [PREFILL]):
        case = make_case(
            requests, params=params, dtype=dtype, scattered=scattered, kv_scales=kv_scales
        )
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
