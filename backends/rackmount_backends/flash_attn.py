"""Attention backend "flash-attn": FlashAttention 4 (the package flash-attn-4) over paged keys.

Its kernels are written in CuTe DSL and compiled when they are first called, a variant for each
head size, grouping and kind of mask. The metadata is the engine's, on the device; nothing follows
from the host's lengths.

A page of exactly one key tile (128 tokens, for heads up to 128) is loaded whole: what stands
behind `seq_lens` then weighs zero, but must be finite. Pages of other sizes are loaded by the row.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rackmount_registry.attention import (
    AttentionBatch,
    AttentionContext,
    AttentionParams,
    DeviceTables,
    KVScales,
)
from rackmount_registry.capabilities import Demand

ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""FlashAttention's own variables: whether and where it keeps compiled kernels."""

QUACK = "0.6."
"""Releases of quack whose modules are known to do without the package."""
COMPILED_BY = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi")
"""With Python's own version, what kernels are kept for."""
PTXAS = "CUTE_DSL_PTXAS_PATH"
"""Where it is set, the package changes how kernels are compiled, and has to be imported."""

_bare = Lock()
"""One thread at a time puts a bare package in place of another."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A step's tables, and what the host may say of it."""

    attend: Callable[..., tuple[Tensor, Any]]
    """FlashAttention's function."""
    tables: DeviceTables
    max_query_len: int | None
    """A bound; None where it changes nothing but the number of variants to compile."""


class FlashAttention:
    """See `rackmount_registry.attention.AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        # It keeps compiled kernels only where it is told to, before it is imported.
        os.environ.setdefault(ENABLED, "1")
        os.environ.setdefault(FOLDER, str(kernel_folder()))
        # It brings a compiler, whose import takes seconds: while weights are read.
        self._imported = ThreadPoolExecutor(1, "flash-attn").submit(import_it)
        self._block_size = context.block_size
        # Below 10.0 there is no kernel that splits a sequence's keys. Where there is one, 0 leaves
        # the number to a heuristic, which goes by shapes and by the bound of the query lengths.
        self._capability = torch.cuda.get_device_capability(context.device)
        self._splits = self._capability >= (10, 0)
        self._unmarked = set(context.layers if keeps_kernels() else ())

    def plan(self, batch: AttentionBatch) -> Plan:
        """The engine's tables, no copies. The first one waits for the import, and raises what is
        wrong with it."""
        assert batch.on_device is not None
        query_lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        return Plan(
            attend=self._imported.result(),
            tables=batch.on_device,
            max_query_len=int(query_lens.max(initial=0)) if self._splits else None,
        )

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: Plan,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each request's cached tokens -> [T, H, D]."""
        assert scales is None, "its kernels read no FP8 cache"
        if len(q) == 0:
            return q.new_empty(q.shape)
        shape = (2, -1, self._block_size, params.num_kv_heads, params.head_size)
        keys, values = cache.view(shape).unbind()
        window = params.sliding_window
        out, _ = plan.attend(
            q,
            keys,
            values,
            cu_seqlens_q=plan.tables.query_start_loc,
            max_seqlen_q=plan.max_query_len,
            seqused_k=plan.tables.seq_lens,
            page_table=plan.tables.block_table,
            softmax_scale=params.scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            softcap=params.soft_cap or 0.0,
            num_splits=0 if self._splits else 1,
        )
        if params in self._unmarked:
            self._leave_mark(q, params)
        return out

    def _leave_mark(self, q: Tensor, params: AttentionParams) -> None:
        """For `missing_kernels` of the next process: what such a layer needs is compiled."""
        dtype = str(q.dtype).removeprefix("torch.")
        kernel_folder().mkdir(parents=True, exist_ok=True)
        (kernel_folder() / mark(dtype, params, self._capability)).touch()
        self._unmarked.remove(params)


def import_it() -> Callable[..., tuple[Tensor, Any]]:
    """The function that attends."""
    alone = modules_alone("quack", "quack-kernels", QUACK)
    with nullcontext() if PTXAS in os.environ else alone:
        from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func


@contextmanager
def modules_alone(package: str, distribution: str, releases: str) -> Iterator[None]:
    """Until it ends, the package's modules are imported without the package itself, in releases
    that begin so; others are imported as ever.

    FlashAttention takes helpers from modules of quack, and quack itself imports kernels of its own
    and for them torch._dynamo: 5 of the 8 seconds that FlashAttention took on one host. Of what it
    does besides, its indexing of CuTe tensors is imported here. Other threads that import the
    package meanwhile get a bare one, and who does so later finds the modules that are there by
    `from package import module` alone.
    """
    with _bare:
        spec = None if package in sys.modules else find_spec(package)
        if spec is None or not release_of(distribution).startswith(releases):
            yield
            return
        sys.modules[package] = module_from_spec(spec)
        try:
            import_module(f"{package}.dsl")
            yield
        finally:
            sys.modules.pop(package, None)


def missing_kernels(demand: Demand) -> str:
    """Why kernels would have to be compiled first; empty where processes before left a mark for
    each of the layers.

    The names of FlashAttention's own files cannot be known without loading the compiler, so that
    `FlashAttention` leaves marks beside them. Of a demand without layers, or where no GPU is,
    nothing is known.
    """
    assert demand.dtype
    if not keeps_kernels():
        return f"its kernels are compiled in each process, as {ENABLED} is not 1"
    if not demand.layers:
        return "which of its kernels are compiled cannot be said of a demand without layers"
    if demand.compute_capability is None:
        return "which of its kernels are compiled cannot be said without a GPU"
    folder = kernel_folder()
    for name in sorted(mark(demand.dtype, it, demand.compute_capability) for it in demand.layers):
        if not (folder / name).exists():
            told = f"ask for it by name once (no {folder / name})"
            return f"its kernels have yet to be compiled: {told}"
    return ""


def mark(dtype: str, params: AttentionParams, capability: tuple[int, int]) -> str:
    """The name of the file that says: kernels for such a layer are compiled. The length of a
    window is not in it, which is an argument of the kernel; a soft cap is compiled in."""
    releases = "-".join(map(release_of, COMPILED_BY))
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    kind = "+".join(sorted(params.features)) or "plain"
    cap = f"-cap{params.soft_cap}" if params.soft_cap else ""
    head = f"{dtype}-head{params.head_size}-{kind}{cap}"
    group = params.num_heads // params.num_kv_heads
    return f"{releases}-{python}-sm{capability[0]}{capability[1]}-{head}-group{group}"


def release_of(distribution: str) -> str:
    """Its version; of a checkout of the sources "unreleased"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unreleased"


def keeps_kernels() -> bool:
    """Whether compiled kernels are there for the next process: FlashAttention takes "1" alone."""
    return os.environ.get(ENABLED, "1") == "1"


def kernel_folder() -> Path:
    """Where compiled kernels are kept for the next process."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else Path.home() / ".cache" / "rackmount" / "flash-attn"
