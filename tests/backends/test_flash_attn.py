"""FlashAttention behind the contract, with a stand-in for the package that takes the same
arguments and computes by the definition."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.attention import PARAMS, Request, decoding, make_case
from torch import Tensor

from rackmount_backends import flash_attn
from rackmount_backends.flash_attn import (
    FlashAttention,
    kernel_folder,
    missing_kernels,
    modules_alone,
)
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


def versions(known: dict[str, str]) -> Callable[[str], str]:
    """`importlib.metadata.version` where these alone are installed."""

    def version(distribution: str) -> str:
        if distribution not in known:
            raise PackageNotFoundError(distribution)
        return known[distribution]

    return version


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test alone; the package, which is not here, is of a release."""
    monkeypatch.setenv(flash_attn.FOLDER, str(tmp_path / "kernels"))
    monkeypatch.setenv(flash_attn.ENABLED, "1")
    monkeypatch.setattr(flash_attn, "version", versions({"flash-attn-4": "4.0.0b36"}))


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


def demand(
    *layers: AttentionParams,
    dtype: str = "float64",
    compute_capability: tuple[int, int] = (9, 0),
) -> Demand:
    """As the engine makes it of a model's layers: of PARAMS, where none are given."""
    layers = layers or (PARAMS,)
    return Demand(
        dtype=dtype,
        compute_capability=compute_capability,
        head_size=layers[0].head_size,
        features=frozenset().union(*(layer.features for layer in layers)),
        layers=frozenset(layers),
    )


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
        demand(dtype="bfloat16", compute_capability=capability),
        demand(compute_capability=(10, 3)),
        demand(replace(PARAMS, head_size=16), compute_capability=capability),
        demand(replace(PARAMS, head_size=80), compute_capability=capability),
        demand(replace(PARAMS, sliding_window=5), compute_capability=capability),
    ):
        assert missing_kernels(other)
    installed = flash_attn.release_of
    for renewed in ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        with monkeypatch.context() as patch:
            known = {renewed: "2"}
            patch.setattr(
                flash_attn, "release_of", lambda name, known=known: known.get(name, installed(name))
            )
            assert missing_kernels(here)
    assert missing_kernels(here) == ""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=99))
        assert missing_kernels(here)


def test_without_a_gpu_nothing_is_said_of_kernels() -> None:
    assert "without a GPU" in missing_kernels(replace(demand(), compute_capability=None))


def test_features_have_marks_of_their_own(vendor: Vendor, capability: tuple[int, int]) -> None:
    make_case(FlashAttention, MIXED, params=WINDOW).run()
    longer = replace(WINDOW, sliding_window=7)
    assert missing_kernels(demand(WINDOW, longer, compute_capability=capability)) == ""
    plain = replace(WINDOW, sliding_window=None)
    for other in (plain, replace(plain, soft_cap=1.5), replace(WINDOW, soft_cap=1.5)):
        assert missing_kernels(demand(other, compute_capability=capability))


def test_a_mark_is_of_one_number_of_query_heads_to_a_kv_head(
    vendor: Vendor, capability: tuple[int, int]
) -> None:
    four, two, wide = (
        replace(PARAMS, num_heads=heads, num_kv_heads=kv_heads)
        for heads, kv_heads in ((8, 2), (4, 2), (16, 4))
    )
    make_case(FlashAttention, DECODE, params=four).run()
    assert missing_kernels(demand(four, wide, compute_capability=capability)) == ""
    assert "-group2" in missing_kernels(demand(two, compute_capability=capability))


def test_kernels_of_all_layers_must_be_compiled(
    vendor: Vendor, capability: tuple[int, int]
) -> None:
    """Features of the demand as a whole, which cells look at, say nothing of a single layer."""
    layers = (PARAMS, replace(PARAMS, num_heads=8), replace(PARAMS, sliding_window=5))
    here = demand(*layers, compute_capability=capability)
    for layer in reversed(layers):
        assert missing_kernels(here)
        make_case(FlashAttention, MIXED, params=layer).run()
    assert missing_kernels(here) == ""


def test_a_soft_cap_is_compiled_in(vendor: Vendor, capability: tuple[int, int]) -> None:
    make_case(FlashAttention, MIXED, params=CAPPED).run()
    assert missing_kernels(demand(CAPPED, compute_capability=capability)) == ""
    other = replace(CAPPED, soft_cap=30.0)
    assert "-cap30.0" in missing_kernels(demand(other, compute_capability=capability))


def test_without_layers_no_kernel_counts_as_compiled(
    vendor: Vendor, capability: tuple[int, int]
) -> None:
    make_case(FlashAttention, DECODE).run()
    bare = replace(demand(compute_capability=capability), layers=frozenset())
    assert "without layers" in missing_kernels(bare)


def test_a_run_that_failed_leaves_no_mark(
    vendor: Vendor, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["flash_attn.cute"], "flash_attn_varlen_func", lambda *args, **kwargs: 1 / 0
    )
    case = make_case(FlashAttention, DECODE)
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
    assert str(kernel_folder()) in missing_kernels(demand())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that tells that it was imported, with a module of helpers."""
    name = "ducklike"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("import sys\nsys.modules['heavy'] = sys\n")
    (tmp_path / name / "dsl.py").write_text("INDEXED = True\n")
    (tmp_path / name / "helpers.py").write_text("from ducklike.dsl import INDEXED\nVALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(flash_attn, "version", versions({"duck-kernels": "0.6.5"}))
    for module in (name, f"{name}.dsl", f"{name}.helpers", "heavy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def test_modules_are_imported_without_their_package(package: str) -> None:
    with modules_alone(package, "duck-kernels", "0.6."):
        assert import_module(f"{package}.helpers").VALUE == 3
    assert "heavy" not in sys.modules
    # Who imports the package later gets all of it, and the modules that are there by name.
    import_module(package)
    assert "heavy" in sys.modules
    scope: dict[str, Any] = {}
    exec(f"from {package} import helpers", scope)
    assert scope["helpers"].VALUE == 3


@pytest.mark.parametrize("releases", ["0.7.", "1."])
def test_of_other_releases_the_package_is_imported_as_ever(package: str, releases: str) -> None:
    with modules_alone(package, "duck-kernels", releases):
        assert import_module(f"{package}.helpers").VALUE == 3
    assert "heavy" in sys.modules


def test_a_package_that_is_there_already_is_left_alone(package: str) -> None:
    whole = import_module(package)
    with modules_alone(package, "duck-kernels", "0.6."):
        assert import_module(package) is whole
    assert sys.modules[package] is whole


def test_threads_may_import_at_a_time(package: str) -> None:
    """As of two engines."""

    def load(_: int) -> int:
        with modules_alone(package, "duck-kernels", "0.6."):
            time.sleep(0.01)
            return int(import_module(f"{package}.helpers").VALUE)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(load, range(12))) == [3] * 12
    assert package not in sys.modules and "heavy" not in sys.modules


def test_an_import_that_fails_is_told_where_attention_is_first_planned(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    case = make_case(FlashAttention, DECODE)
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        case.run()
