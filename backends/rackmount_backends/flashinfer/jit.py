"""Which kernels of FlashInfer serve a demand, and whether they are compiled already.

FlashInfer compiles a library per variant with nvcc when it first plans with it, and keeps it in a
folder named by version and architectures. Names and places follow `flashinfer.jit.env`,
`flashinfer.compilation_context` and `get_batch_prefill_uri` of release 0.6.14; nothing of it is
imported.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rackmount_registry.capabilities import Demand

DTYPES = {"float16": "f16", "bfloat16": "bf16"}
"""Ours -> theirs."""


def generation(phase: str | None, capability: tuple[int, int]) -> str:
    """FlashInfer's name for the kernels that serve a phase: "fa3" are of Hopper alone, and do not
    split the keys of a sequence, so that decoding takes "fa2"."""
    return "fa3" if phase == "prefill" and capability == (9, 0) else "fa2"


def missing_kernels(demand: Demand) -> str:
    """Why kernels would have to be compiled first; empty when their library is on the disk.

    Of a model with layers of several kinds, the library is looked up that has all their features.
    """
    name = library(demand)
    folders = list(_folders(demand))
    if any((folder / name / f"{name}.so").is_file() for folder in folders):
        return ""
    return (
        "its kernels have yet to be compiled: ask for it by name once "
        f"(no {folders[0] / name / name}.so)"
    )


def library(demand: Demand) -> str:
    """Name of the library that serves `demand`."""
    assert demand.dtype and demand.kv_dtype and demand.compute_capability
    dtype, size = DTYPES[demand.dtype], demand.head_size
    name = (
        f"batch_prefill_with_kv_cache_dtype_q_{dtype}_dtype_kv_{DTYPES[demand.kv_dtype]}_"
        f"dtype_o_{dtype}_dtype_idx_i32_head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_"
        f"use_swa_{'sliding_window' in demand.features}_"
        f"use_logits_cap_{'soft_cap' in demand.features}_f16qk_False"
    )
    fa3 = generation(demand.phase, demand.compute_capability) == "fa3"
    return name + "_sm90" if fa3 else name


def _folders(demand: Demand) -> Iterator[Path]:
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    release = base / ".cache" / "flashinfer" / version("flashinfer-python")
    yield release / _architectures(demand) / "cached_ops"
    compiled = find_spec("flashinfer_jit_cache")  # their package of compiled libraries
    for place in (compiled and compiled.submodule_search_locations) or ():
        yield Path(place) / "jit_cache"


def _architectures(demand: Demand) -> str:
    """As FlashInfer joins what it compiles for: what it is told to, or the GPU."""
    assert demand.compute_capability
    own = ".".join(map(str, demand.compute_capability))
    listed = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", own).split(" ")
    numbers = (each.split(".") for each in listed)
    return "_".join(
        f"{major}{minor}" for major, minor in sorted((int(a), _suffixed(a, b)) for a, b in numbers)
    )


def _suffixed(major: str, minor: str) -> str:
    """The minor version with the letter of nvcc's architecture."""
    if minor[-1].isalpha() or int(major) < 9:
        return minor
    return minor + ("f" if (major, minor) == ("12", "0") else "a")
