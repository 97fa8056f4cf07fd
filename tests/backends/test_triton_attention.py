"""The triton backend against the definition of causal attention, in Triton's interpreter."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import attention
from tests.helpers.attention import Case, Request, decoding
from tests.helpers.interpreter import mend_casts, mend_loops

from rackmount_backends.triton_attention import backend, tiles
from rackmount_backends.triton_attention import decode as decode_module
from rackmount_backends.triton_attention.backend import TritonAttention
from rackmount_backends.triton_attention.prefill import list_tiles
from rackmount_registry.attention import AttentionParams

LAYER = AttentionParams(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
CHUNK = Request(query_len=7, seq_len=90)
PREFILL = Request(query_len=37, seq_len=37)

make_case = partial(
    attention.make_case, TritonAttention, params=LAYER, dtype=torch.float32, block_size=16
)


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight multiprocessors: enough to cut requests into parts, few enough for the interpreter."""
    mend_loops(monkeypatch)
    mend_casts(monkeypatch)
    monkeypatch.setattr(backend, "num_processors", lambda device: 8)
    monkeypatch.setattr(decode_module, "widen_pairs", widen_pairs_plainly)


@triton.jit
def widen_pairs_plainly(pairs):
    """The interpreter knows no assembly."""
    even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)


def assert_close(case: Case) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[case.q.dtype]
    out = case.run()
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    torch.testing.assert_close(out.double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (7, 1), (18, 1)], ids=lambda n: str(n)
)
def test_any_heads_are_served(num_heads: int, num_kv_heads: int, head_size: int) -> None:
    params = AttentionParams(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=0.1
    )
    assert_close(make_case([*decoding(70), Request(query_len=5, seq_len=40)], params=params))


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_block_size_is_served(dtype: torch.dtype, block_size: int) -> None:
    requests = [*decoding(1, 129), CHUNK, PREFILL]
    assert_close(make_case(requests, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 64, 70, 500])
def test_windows_and_soft_caps_hold_in_both_kernels(
    window: int | None, soft_cap: float | None
) -> None:
    params = replace(LAYER, scale=0.5, sliding_window=window, soft_cap=soft_cap)
    assert_close(make_case([*decoding(150, 3), CHUNK, PREFILL], params=params))


def test_a_window_narrower_than_a_tile_of_many_tokens_hides_whole_tiles_of_keys() -> None:
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=16, scale=0.3, sliding_window=3)
    assert_close(make_case([Request(query_len=150, seq_len=200)], params=params))


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("kv_scales", [([0.01], [0.03]), ([0.004, 0.02], [0.3, 0.002])])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_fp8_cache_is_what_it_stands_for(
    dtype: torch.dtype,
    window: int | None,
    kv_scales: tuple[list[float], list[float]],
    head_size: int,
) -> None:
    params = replace(LAYER, head_size=head_size, sliding_window=window, soft_cap=3.0)
    requests = [*decoding(1, 150), CHUNK, PREFILL]
    assert_close(make_case(requests, params=params, dtype=dtype, kv_scales=kv_scales))


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("requests", [decoding(70), [CHUNK]], ids=["decode", "prefill"])
def test_queries_of_any_size_meet_an_fp8_cache(requests: list[Request], size: float) -> None:
    """Beyond the end of float16, which is what they are multiplied in."""
    params = replace(LAYER, scale=0.125 / max(size, 1.0))
    scales = ([0.01, 0.02], [0.02, 0.01])
    case = make_case(requests, params=params, dtype=torch.bfloat16, kv_scales=scales)
    assert_close(replace(case, q=case.q * size))


@pytest.mark.parametrize(
    "lengths", [[400], [300, 5], [1, 260, 64, 65, 17], [200] * 5, [1] * 9, [1, 1, 1, 700, 1]]
)
def test_parts_of_a_request_are_merged(lengths: list[int]) -> None:
    for fp8 in ({}, {"dtype": torch.float16, "kv_scales": ([0.01], [0.02, 0.03])}):
        case = make_case(decoding(*lengths), **fp8)
        assert_close(case)
        assert_close(case)  # the counts are back at zero


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([400], 4),  # 7 tiles for 4 programs: shares of 2
        ([64 * 4], 4),
        ([64 * 33], 4),  # of 9
        ([100, 1, 256], 3),  # 2 + 1 + 4 tiles in shares of 2: the first two are whole
        ([64 * 3] * 8, 0),  # of 6 tiles, two requests
    ],
)
def test_programs_have_shares_of_the_same_size(lengths: list[int], parts: int) -> None:
    case = make_case(decoding(*lengths))
    levels = case.backend._workspace.levels.fill_(float("nan"))
    case.run()
    assert int(levels.isfinite().sum()) == parts * LAYER.num_heads


def test_a_long_request_is_not_cut_into_more_parts_than_are_worth_a_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "num_processors", lambda device: 64)
    case = make_case(decoding(64 * 33))  # the root of 33 / 8 is more than 2 tiles
    levels = case.backend._workspace.levels.fill_(float("nan"))
    assert_close(case)
    assert int(levels.isfinite().sum()) == 11 * LAYER.num_heads


def test_many_requests_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many fit a multiprocessor where their pipelines are short: then none is cut, and what
    fewer requests leave of theirs still fits the workspace."""
    monkeypatch.setattr(tiles, "LEAST_SHARED_BYTES", tiles.SHARED_BYTES[9, 0])
    params = replace(LAYER, head_size=128)
    few, many = decoding(100, 200, 300), decoding(*[64 * 8] * 15)
    for requests, parts in ((few, True), (many, False)):
        case = make_case(requests, params=params, dtype=torch.float16)
        levels = case.backend._workspace.levels.fill_(float("nan"))
        assert_close(case)
        assert bool(levels.isfinite().any()) == parts


@pytest.mark.parametrize(
    ("head_size", "contexts", "stages"), [(128, 3.5, 4), (128, 3.7, 2), (64, 8.0, 4)]
)
def test_pipelines_are_short_where_that_makes_room(
    head_size: int, contexts: float, stages: int
) -> None:
    """Heads of 64 have as many programs with long ones."""
    assert tiles.decode_tiles(head_size, 4, 2, (9, 0), contexts).num_stages == stages


def test_requests_without_tokens_are_passed_over() -> None:
    """Their rows are left as they are: nobody reads them."""
    case = make_case(decoding(1, 70, 1, 1, 200, 1))
    lengths = torch.tensor([0, 70, 0, 0, 200, 0], dtype=torch.int32)
    case.batch.on_device.seq_lens.copy_(lengths)
    out, served = case.run(), lengths > 0
    expected = case.expected()[served]
    torch.testing.assert_close(out[served].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_static_batch_follows_the_lengths_on_the_device() -> None:
    """Planned once, as at a capture, with lengths that are no longer true."""
    case = make_case(decoding(200, 30, 1))
    stale = replace(
        case.batch, seq_lens=np.array([7, 1, 1], np.int32), block_table=None, is_static=True
    )
    plan = case.backend.plan(stale)
    for lengths in ([200, 30, 1], [3, 20, 1]):
        case.batch.on_device.seq_lens.copy_(torch.tensor(lengths))
        pairs = zip(case.sequences, lengths, strict=True)
        now = replace(case, sequences=[(k[:n], v[:n]) for (k, v), n in pairs])
        out = case.backend.run(case.q, case.cache, plan, case.params, None)
        torch.testing.assert_close(out.double(), now.expected(), rtol=1e-5, atol=1e-5)


def test_a_view_of_the_projection_is_taken_as_it_comes() -> None:
    case = make_case([*decoding(70), CHUNK])
    q = torch.cat((case.q, torch.full_like(case.q, float("nan"))), 1)[:, : LAYER.num_heads]
    assert_close(replace(case, q=q))


def test_a_step_without_requests_gives_no_rows() -> None:
    assert make_case([]).run().shape == (0, LAYER.num_heads, LAYER.head_size)


@st.composite
def request_lists(draw: st.DrawFn) -> list[Request]:
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        seq_len = draw(st.integers(1, 150))
        requests.append(
            Request(query_len=draw(st.just(1) | st.integers(1, min(seq_len, 50))), seq_len=seq_len)
        )
    return requests


@settings(max_examples=25, deadline=None)
@given(
    requests=request_lists(),
    num_kv_heads=st.sampled_from((1, 3)),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_the_definition(
    requests: list[Request], num_kv_heads: int, window: int | None, seed: int
) -> None:
    params = AttentionParams(
        num_heads=3, num_kv_heads=num_kv_heads, head_size=16, scale=0.4, sliding_window=window
    )
    assert_close(make_case(requests, params=params, seed=seed))


def test_tiles_cover_every_chunk_once_and_the_longest_context_comes_first() -> None:
    query_lens, seq_lens = np.array([5, 1, 70, 32]), np.array([5, 9, 100, 500])
    listed = list_tiles(np.array([0, 2, 3]), query_lens, seq_lens, 32)
    assert listed.tolist() == [[3, 0], [2, 64], [2, 32], [2, 0], [0, 0]]
