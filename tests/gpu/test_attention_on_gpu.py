"""Every attention backend that is installed against the definition, on whatever its cells allow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.attention import Case, Request, decoding, make_case
from tests.helpers.mounting import plugins

from rackmount_registry.attention import AttentionBatch, AttentionParams
from rackmount_registry.capabilities import Demand
from rackmount_registry.descriptors import AttentionBackend
from rackmount_registry.offers import Offer

pytestmark = pytest.mark.gpu

BACKENDS: list[Offer[AttentionBackend]] = [
    offer
    for offer in plugins().offers("attention_backend")
    if offer.name != "torch" and not offer.missing()
]
each_backend = pytest.mark.parametrize("offer", BACKENDS, ids=lambda offer: offer.name)

LLAMA = AttentionParams(num_heads=8, num_kv_heads=2, head_size=128, scale=128**-0.5)
Scales = tuple[list[float], list[float]]
PER_TENSOR: Scales = ([0.01], [0.02])
PER_HEAD: Scales = ([0.01, 0.003], [0.3, 0.004])
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
MIXED = [
    *decoding(1, 17, 300, 4097),
    Request(query_len=64, seq_len=900),
    Request(query_len=333, seq_len=333),
    Request(query_len=2, seq_len=130),
    *decoding(64),
]


def case_of(
    offer: Offer[AttentionBackend],
    requests: list[Request],
    *,
    params: AttentionParams = LLAMA,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    phases: tuple[str, ...] = ("prefill", "decode"),
    kv_scales: Scales | None = None,
) -> Case:
    """Skips what the backend's cells refuse."""
    name = str(dtype).removeprefix("torch.")
    features = {"head_scales"} if kv_scales is not None and len(kv_scales[0]) > 1 else set()
    for phase in phases:
        demand = Demand(
            device="cuda",
            compute_capability=torch.cuda.get_device_capability(),
            dtype=name,
            kv_dtype=name if kv_scales is None else "float8_e4m3fn",
            head_size=params.head_size,
            block_size=block_size,
            phase=phase,
            features=params.features | features,
        )
        refusals = [cell.refusals(demand) for cell in offer.descriptor.cells]
        if all(refusals):
            pytest.skip("; ".join(refusals[0]))
    arguments: dict[str, Any] = {"params": params, "dtype": dtype, "block_size": block_size}
    return make_case(offer.load(), requests, device="cuda", kv_scales=kv_scales, **arguments)


def assert_close(out: torch.Tensor, case: Case) -> None:
    tolerance = TOLERANCES[case.q.dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected(), rtol=tolerance, atol=tolerance)


@each_backend
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (14, 2), (16, 1)])
def test_any_heads(
    offer: Offer[AttentionBackend], heads: int, kv_heads: int, head_size: int
) -> None:
    params = AttentionParams(
        num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, scale=head_size**-0.5
    )
    for requests in (MIXED, decoding(5, 700, 64)):
        case = case_of(offer, requests, params=params)
        assert_close(case.run(), case)


@each_backend
@pytest.mark.parametrize("longest", [64, 700, 2100])
def test_more_requests_than_fill_the_gpu(offer: Offer[AttentionBackend], longest: int) -> None:
    """Twice, so that what is counted while parts are merged is back at zero."""
    params = AttentionParams(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5)
    lengths = np.random.default_rng(longest).integers(1, longest, 70, endpoint=True)
    case = case_of(offer, decoding(*lengths.tolist()), params=params, phases=("decode",))
    for _ in range(2):
        assert_close(case.run(), case)


@each_backend
@pytest.mark.parametrize("kv_scales", [PER_TENSOR, PER_HEAD], ids=["tensor", "head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", [2, 8, 14])
def test_an_fp8_cache_is_what_it_stands_for(
    offer: Offer[AttentionBackend],
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    kv_scales: Scales,
) -> None:
    params = AttentionParams(
        num_heads=heads, num_kv_heads=2, head_size=head_size, scale=head_size**-0.5
    )
    for requests in (MIXED, decoding(5, 700, 64), decoding(33000)):
        case = case_of(offer, requests, params=params, dtype=dtype, kv_scales=kv_scales)
        for _ in range(2):
            assert_close(case.run(), case)


@each_backend
@pytest.mark.parametrize("kv_scales", [PER_TENSOR, PER_HEAD], ids=["tensor", "head"])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_windows_and_soft_caps_over_an_fp8_cache(
    offer: Offer[AttentionBackend], window: int | None, soft_cap: float | None, kv_scales: Scales
) -> None:
    params = replace(LLAMA, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    for block_size in (16, 64):
        case = case_of(offer, MIXED, params=params, block_size=block_size, kv_scales=kv_scales)
        assert_close(case.run(), case)


@each_backend
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_any_block_size_and_dtype(
    offer: Offer[AttentionBackend], dtype: torch.dtype, block_size: int
) -> None:
    case = case_of(offer, MIXED, dtype=dtype, block_size=block_size)
    assert_close(case.run(), case)


@each_backend
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 100, 1024])
def test_windows_and_soft_caps(
    offer: Offer[AttentionBackend], window: int | None, soft_cap: float | None
) -> None:
    params = replace(LLAMA, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    for requests in (MIXED, decoding(5, 2000, 99)):
        case = case_of(offer, requests, params=params)
        assert_close(case.run(), case)


@each_backend
@pytest.mark.parametrize(
    "lengths",
    [[33000], [1, 33000], [1000] * 64, [100] * 255 + [9000], list(range(1, 513))],
    ids=["alone", "beside-short", "even", "one-long", "all-lengths"],
)
def test_decoding_of_few_and_many(offer: Offer[AttentionBackend], lengths: list[int]) -> None:
    case = case_of(offer, decoding(*lengths), phases=("decode",))
    for _ in range(2):  # what the first left behind does not matter
        assert_close(case.run(), case)


@each_backend
def test_runs_are_equal_bit_by_bit(offer: Offer[AttentionBackend]) -> None:
    case = case_of(offer, decoding(33000, 5, 8000), phases=("decode",))
    first = case.run()
    assert all(torch.equal(case.run(), first) for _ in range(20))


@each_backend
def test_a_step_without_requests_gives_no_rows(offer: Offer[AttentionBackend]) -> None:
    assert case_of(offer, []).run().shape == (0, LLAMA.num_heads, LLAMA.head_size)


@each_backend
@pytest.mark.parametrize("kv_scales", [None, PER_TENSOR], ids=["own", "fp8"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("longest", [[4000], [700, 30, 1, 5000, 64], [300] * 70])
def test_a_captured_step_follows_changed_lengths(
    offer: Offer[AttentionBackend],
    longest: list[int],
    window: int | None,
    kv_scales: Scales | None,
) -> None:
    """Captured with one token of context each; the last request of a replay is padding."""
    if not offer.descriptor.graph_safe:
        pytest.skip("not graph-safe")
    params = replace(LLAMA, sliding_window=window)
    case = case_of(
        offer, decoding(*longest), params=params, phases=("decode",), kv_scales=kv_scales
    )
    assert case.batch.on_device is not None

    def batch_of(lengths: list[int]) -> AttentionBatch:
        case.batch.on_device.seq_lens.copy_(torch.tensor(lengths))
        return replace(case.batch, seq_lens=np.array(lengths, np.int32), is_static=True)

    def run(plan: Any) -> torch.Tensor:
        return case.backend.run(case.q, case.cache, plan, params, case.scales)

    plan = case.backend.plan(batch_of([1] * len(longest)))
    run(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(plan) for _ in range(3)]  # as many layers
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = [int(rng.integers(1, n + 1)) for n in longest]
        lengths[-1] = 1 if len(lengths) > 1 else lengths[-1]
        batch = batch_of(lengths)
        if offer.descriptor.metadata == "host":
            case.backend.plan(batch)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        pairs = zip(case.sequences, lengths, strict=True)
        now = replace(case, sequences=[(k[:n], v[:n]) for (k, v), n in pairs])
        for out in outs:
            assert_close(out, now)
