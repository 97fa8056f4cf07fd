"""FlashInfer behind the contract, with a stand-in for the package that takes the same arguments,
keeps what is planned apart from what is on the device, and computes by the definition."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.attention import PARAMS, Case, Request, decoding, make_case
from torch import Tensor

from rackmount_backends.flashinfer.pages import list_pages
from rackmount_registry.attention import AttentionParams
from rackmount_registry.step import attend_causally

WINDOW = AttentionParams(num_heads=4, num_kv_heads=4, head_size=8, scale=0.2, sliding_window=5)
CAPPED = AttentionParams(num_heads=2, num_kv_heads=1, head_size=16, scale=0.9, soft_cap=1.5)

LAYERS = (PARAMS, WINDOW, CAPPED)

DECODE = decoding(37, 1, 16)
MIXED = [*decoding(20, 3), Request(query_len=9, seq_len=9), Request(query_len=7, seq_len=40)]


class Wrapper:
    """What the wrappers of flashinfer 0.6.14 have in common: `q_lens` and `kv_lens` are planned on
    the host, pages are read from the device when it runs."""

    def keep(
        self,
        indptr: Tensor,
        last_page_len: Tensor,
        q_lens: list[int],
        layer: dict[str, Any],
        page_size: int,
        window_left: int,
        logits_soft_cap: float,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        assert len(q_lens) > 0, "division by the number of requests"
        assert indptr.dtype == last_page_len.dtype == torch.int32
        assert indptr.device.type == "cpu", "the plan would wait for the device"
        self.q_lens, self.kv_lens = q_lens, lengths(indptr, last_page_len, page_size)
        self.page_size, self.dtypes = page_size, dtypes
        self.params = AttentionParams(
            sliding_window=None if window_left == -1 else window_left + 1,
            soft_cap=logits_soft_cap or None,
            **layer,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor,
    ) -> Tensor:
        assert isinstance(paged_kv_cache, tuple) and paged_kv_cache[0].shape[1] == self.page_size
        assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
        ends, last = self.paged_kv_indptr, self.paged_kv_last_page_len
        assert lengths(ends, last, self.page_size) == self.kv_lens
        outs = []
        for new, total, start in zip(
            q.split(self.q_lens), self.kv_lens, ends.tolist(), strict=False
        ):
            pages = self.paged_kv_indices[start : start - (-total // self.page_size)].long()
            keys, values = (t[pages].flatten(0, 1)[:total].to(q) for t in paged_kv_cache)
            params = replace(self.params, scale=self.params.scale * (k_scale or 1.0))
            outs.append(attend_causally(new, keys, values, params))
        return out.copy_(torch.cat(outs)).mul_(v_scale or 1.0)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        assert kv_layout == "NHD"
        self.backend = backend

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        max_token_per_sequence: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal and max_token_per_sequence == int(qo_indptr.diff().max())
        layer = {"num_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "scale": sm_scale}
        self.keep(
            paged_kv_indptr,
            paged_kv_last_page_len,
            qo_indptr.diff().tolist(),
            layer | {"head_size": head_dim_qk},
            page_size,
            window_left,
            logits_soft_cap,
            (q_data_type, kv_data_type),
        )
        self.paged_kv_indptr, self.paged_kv_indices = paged_kv_indptr, paged_kv_indices
        self.paged_kv_last_page_len = paged_kv_last_page_len


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and use_tensor_cores and backend == "fa2"
        self.use_cuda_graph, self.num_plans = use_cuda_graph, 0
        if paged_kv_last_page_len_buffer is not None:
            assert use_cuda_graph and paged_kv_indptr_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.paged_kv_indptr = paged_kv_indptr_buffer
            self.paged_kv_indices = paged_kv_indices_buffer
            self.paged_kv_last_page_len = paged_kv_last_page_len_buffer

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, **values: Any) -> None:
        self.num_plans += 1
        if self.use_cuda_graph:
            self.paged_kv_indptr.copy_(indptr)
            self.paged_kv_last_page_len.copy_(last_page_len)
            self.paged_kv_indices[: len(indices)].copy_(indices)
        else:
            self.paged_kv_indptr, self.paged_kv_indices = indptr, indices
            self.paged_kv_last_page_len = last_page_len
        fast_decode_plan(self, indptr, indices, last_page_len, **values)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
    sm_scale: float,
) -> None:
    assert self.num_plans, "it has no kernels before it was planned once"
    assert len(last_page_len) == len(self.paged_kv_last_page_len)
    assert len(indices) <= len(self.paged_kv_indices)
    layer = {"num_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "scale": sm_scale}
    self.keep(
        indptr,
        last_page_len,
        [1] * len(last_page_len),
        layer | {"head_size": head_dim},
        page_size,
        window_left,
        logits_soft_cap,
        (q_data_type, kv_data_type),
    )


def lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> list[int]:
    return ((indptr.diff() - 1) * page_size + last_page_len).tolist()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said to the stream's events; the GPU is an H200."""
    said: list[str] = []
    event = SimpleNamespace(synchronize=lambda: said.append("waited for"))
    stream = SimpleNamespace(record_event=lambda: said.append("recorded") or event)
    gpu = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return said


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, copies: list[str]) -> Iterator[ModuleType]:
    """The backend's module upon the stand-in."""
    decode, prefill = ModuleType("flashinfer.decode"), ModuleType("flashinfer.prefill")
    vars(decode).update(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan=fast_decode_plan,
    )
    vars(prefill).update(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    for module in (ModuleType("flashinfer"), decode, prefill):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "rackmount_backends.flashinfer.backend"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.mark.parametrize("params", LAYERS, ids=["plain", "window", "soft cap"])
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_it_gives_what_the_definition_gives(
    requests: list[Request], params: AttentionParams, backend: ModuleType
) -> None:
    case = make_case(
        lambda context: backend.FlashInfer(replace(context, layers=frozenset(LAYERS))),
        requests,
        params=params,
    )
    torch.testing.assert_close(case.run(), case.expected())


@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_an_fp8_cache_is_what_it_stands_for(requests: list[Request], backend: ModuleType) -> None:
    case = make_case(backend.FlashInfer, requests, kv_scales=([0.01], [0.02]))
    for _ in range(2):
        torch.testing.assert_close(case.run(), case.expected())
    plans = case.backend.plan(make_case(lambda _: case.backend, MIXED).batch)
    assert plans[PARAMS].backend == "fa2", "the other takes FP8 queries"


def test_a_static_plan_is_renewed_in_place(backend: ModuleType) -> None:
    ours = make_case(
        lambda context: backend.FlashInfer(replace(context, layers=frozenset(LAYERS))),
        decoding(1, 1, 1),
    ).backend

    def static(*lens: int, params: AttentionParams = PARAMS, seed: int = 0) -> Case:
        case = make_case(lambda _: ours, decoding(*lens), params=params, seed=seed)
        return replace(case, batch=replace(case.batch, is_static=True))

    plans = {size: ours.plan(static(*[1] * size).batch) for size in (3, 2)}
    for seed, lens in enumerate([(37, 1, 16), (500, 33), (17, 450, 512), (1, 1)]):
        for params in LAYERS:
            case = static(*lens, params=params, seed=seed)
            assert ours.plan(case.batch) is plans[len(lens)]
            torch.testing.assert_close(case.run(), case.expected())
    assert {wrapper.num_plans for wrapper in plans[3].values()} == {1}, "the others would wait"


def test_a_plan_waits_for_the_copies_of_the_one_before(
    backend: ModuleType, copies: list[str]
) -> None:
    case = make_case(backend.FlashInfer, DECODE)
    for batch in (case.batch, make_case(lambda _: case.backend, MIXED).batch):
        case.backend.plan(batch)
    assert copies == ["recorded", "waited for", "recorded"]


def test_no_requests_give_no_rows(backend: ModuleType) -> None:
    assert make_case(backend.FlashInfer, []).run().shape == (0, 6, 8)


def test_hopper_has_prefill_kernels_of_its_own(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(backend.FlashInfer, MIXED)
    assert case.backend.plan(case.batch)[PARAMS].backend == "fa3"
    ampere = SimpleNamespace(multi_processor_count=108, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ampere)
    case = make_case(backend.FlashInfer, MIXED)
    assert case.backend.plan(case.batch)[PARAMS].backend == "fa2"


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_pages_are_listed_request_by_request(block_size: int, backend: ModuleType) -> None:
    requests = decoding(48, 1, 49, 47)
    batch = make_case(backend.FlashInfer, requests, block_size=block_size).batch
    pages = list_pages(batch, block_size)
    expected: list[int] = []
    for request, (row, total) in enumerate(zip(batch.rows, batch.seq_lens, strict=True)):
        count = -(-int(total) // block_size)
        expected += batch.block_table[row, :count].tolist()
        assert int(pages.indptr[request + 1]) == len(expected)
        assert (count - 1) * block_size + int(pages.last_lens[request]) == total
    assert pages.indices.tolist() == expected
    assert {t.dtype for t in (pages.indptr, pages.indices, pages.last_lens)} == {torch.int32}


@pytest.mark.parametrize(
    ("heads", "max_num_seqs", "tiles", "tile"),
    [
        ((32, 8), 64, 79, 16),  # 256 query rows in tiles of 16, and a tile begun by each request
        ((32, 8), 1, 33, 128),  # two tiles per multiprocessor, over 8 key heads
        ((64, 2), 256, 383, 64),
        ((128, 1), 256, 511, 128),
    ],
)
def test_the_workspace_holds_what_flashinfer_takes_from_it(
    backend: ModuleType, heads: tuple[int, int], max_num_seqs: int, tiles: int, tile: int
) -> None:
    num_heads, num_kv_heads = heads
    layer = AttentionParams(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128, scale=1.0
    )
    num_bytes = backend.workspace_bytes(layer, max_num_seqs, num_sms=132)
    assert num_bytes >= num_heads * tiles * tile * 129 * 4
    assert num_bytes <= num_heads * 2 * max(tiles * tile, 264 // num_kv_heads * 128) * 129 * 4
