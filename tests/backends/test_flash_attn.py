"""FlashAttention behind the contract, with a stand-in for the package that takes the same
arguments and computes by the definition."""

import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.attention import PARAMS, Request, decoding, make_case
from torch import Tensor

from rackmount_backends import flash_attn
from rackmount_backends.flash_attn import FlashAttention, kernel_folder, missing_kernels
from rackmount_registry.attention import AttentionParams
from rackmount_registry.capabilities import Demand
from rackmount_registry.step import attend_causally

WINDOW = AttentionParams(num_heads=4, num_kv_heads=4, head_size=8, scale=0.2, sliding_window=5)
CAPPED = AttentionParams(num_heads=2, num_kv_heads=1, head_size=16, scale=0.9, soft_cap=1.5)

DECODE = decoding(37, 1, 16)
MIXED = [*decoding(20, 3), Request(query_len=9, seq_len=9), Request(query_len=7, seq_len=40)]


class Vendor:
    """`flash_attn.cute.flash_attn_varlen_func` of flash-attn-4 4.0.0b36, on the CPU."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int | None = None,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        softcap: float = 0.0,
        num_splits: int = 1,
    ) -> tuple[Tensor, None]:
        self.calls.append({"max_seqlen_q": max_seqlen_q, "num_splits": num_splits})
        for table in (cu_seqlens_q, seqused_k, page_table):
            assert table.dtype == torch.int32 and table.stride(-1) == 1
        assert k.shape == v.shape and page_table.shape[0] == len(seqused_k)
        assert causal and window_size in ((None, None), (window_size[0], 0))
        left = window_size[0]
        params = AttentionParams(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[2],
            head_size=q.shape[2],
            scale=softmax_scale,
            sliding_window=None if left is None else left + 1,
            soft_cap=softcap or None,
        )
        outs = []
        for new, total, pages in zip(
            q.split(cu_seqlens_q.diff().tolist()), seqused_k.tolist(), page_table, strict=True
        ):
            used = pages[: -(-total // k.shape[1])].long()
            keys, values = (t[used].flatten(0, 1)[:total] for t in (k, v))
            outs.append(attend_causally(new, keys, values, params))
        return torch.cat(outs), None


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test alone; the package, which is not here, is of a release."""
    monkeypatch.setenv(flash_attn.FOLDER, str(tmp_path / "kernels"))
    monkeypatch.setenv(flash_attn.ENABLED, "1")
    monkeypatch.setattr(flash_attn, "version", {"flash-attn-4": "4.0.0b36"}.__getitem__)


@pytest.fixture(params=[(9, 0), (10, 0)], ids=["9.0", "10.0"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return request.param


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Vendor:
    vendor, cute = Vendor(), ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = vendor.flash_attn_varlen_func  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    return vendor


@pytest.mark.parametrize("params", [PARAMS, WINDOW, CAPPED], ids=["plain", "window", "soft cap"])
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_it_gives_what_the_definition_gives(
    requests: list[Request],
    params: AttentionParams,
    vendor: Vendor,
    capability: tuple[int, int],
) -> None:
    case = make_case(FlashAttention, requests, params=params)
    torch.testing.assert_close(case.run(), case.expected())


def test_keys_are_split_only_where_there_is_a_kernel_for_it(
    vendor: Vendor, capability: tuple[int, int]
) -> None:
    for requests in (DECODE, MIXED):
        make_case(FlashAttention, requests).run()
    bounds = [None, None] if capability < (10, 0) else [1, 9]
    splits = 1 if capability < (10, 0) else 0
    assert vendor.calls == [{"max_seqlen_q": bound, "num_splits": splits} for bound in bounds]


def test_a_static_plan_follows_the_tables_on_the_device_alone(
    vendor: Vendor, capability: tuple[int, int]
) -> None:
    case = make_case(FlashAttention, DECODE)
    tables = case.batch.on_device
    assert tables is not None
    lens, blocks = tables.seq_lens.clone(), tables.block_table.clone()
    padding = np.ones_like(case.batch.seq_lens)
    plan = case.backend.plan(replace(case.batch, seq_lens=padding, is_static=True))
    tables.seq_lens.fill_(1)
    tables.block_table.copy_(tables.block_table[:, :1].expand_as(blocks).clone())
    first = case.backend.run(case.q, case.cache, plan, PARAMS, None)
    tables.seq_lens.copy_(lens)
    tables.block_table.copy_(blocks)
    torch.testing.assert_close(
        case.backend.run(case.q, case.cache, plan, PARAMS, None), case.expected()
    )
    assert not torch.equal(first, case.expected())


def test_no_requests_give_no_rows(vendor: Vendor, capability: tuple[int, int]) -> None:
    assert make_case(FlashAttention, []).run().shape == (0, 6, 8)
    assert vendor.calls == []


HOPPER = Demand(dtype="float64", head_size=8, compute_capability=(9, 0))


def demand(**values: Any) -> Demand:
    return replace(HOPPER, **values)


def test_a_run_leaves_a_mark_of_what_it_compiled_and_of_nothing_else(
    vendor: Vendor, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = demand(compute_capability=capability)
    assert "ask for it by name once" in missing_kernels(here)
    case = make_case(FlashAttention, DECODE)
    assert missing_kernels(here), "nothing ran"
    case.run()
    case.run()
    assert missing_kernels(here) == ""
    for other in (
        {"dtype": "bfloat16"},
        {"head_size": 16},
        {"head_size": 80},
        {"features": frozenset({"sliding_window"})},
        {"compute_capability": (10, 3)},
    ):
        assert missing_kernels(replace(here, **other))
    monkeypatch.setattr(flash_attn, "version", lambda name: f"2 of {name}")
    assert missing_kernels(here)


def test_features_have_marks_of_their_own(vendor: Vendor, capability: tuple[int, int]) -> None:
    make_case(FlashAttention, MIXED, params=WINDOW).run()
    windowed = demand(features=frozenset({"sliding_window"}), compute_capability=capability)
    assert missing_kernels(windowed) == ""
    both = windowed.features | {"soft_cap"}
    for features in (frozenset(), frozenset({"soft_cap"}), both):
        assert missing_kernels(replace(windowed, features=features))


def test_a_run_that_failed_leaves_no_mark(
    vendor: Vendor, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(FlashAttention, DECODE)
    monkeypatch.setattr(case.backend, "_attend", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        case.run()
    assert missing_kernels(demand(compute_capability=capability))


def test_kernels_that_are_not_kept_leave_no_mark(
    vendor: Vendor, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flash_attn.ENABLED, "0")
    make_case(FlashAttention, DECODE).run()
    here = demand(compute_capability=capability)
    assert f"{flash_attn.ENABLED} is not 1" in missing_kernels(here)
    monkeypatch.setenv(flash_attn.ENABLED, "1")
    assert missing_kernels(here)


def test_sources_without_a_release_have_marks_too(
    vendor: Vendor, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(flash_attn, "version", unknown)
    make_case(FlashAttention, DECODE).run()
    assert missing_kernels(demand(compute_capability=capability)) == ""


def test_the_usual_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flash_attn.FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_folder() == tmp_path / ".cache" / "rackmount" / "flash-attn"
    assert str(kernel_folder()) in missing_kernels(HOPPER)
