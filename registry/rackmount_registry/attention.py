"""Paged attention: what a backend is given and what it promises.

The KV cache is written by the op `rotary_write` and read by backends, so its layouts are named and
specified here.

Shapes: T tokens of the step, R requests, H query heads, G key/value heads, D head size, S slots of
the KV pool.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""448: greater values are stored as this."""


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """How the keys and values of all layers are stored, and what becomes of the scales that a
    checkpoint holds for an FP8 cache."""

    dtype: torch.dtype
    per: Literal["tensor", "head"] = "tensor"
    """What has a scale of its own in the checkpoint: a layer's keys or values, or each head of
    them."""
    scale: float | None = None
    """Of every layer, for checkpoints that have none. None: theirs, which must be there."""
    ignores_scales: bool = False
    """The cache is not FP8 because somebody said so: scales of the checkpoint are of no use."""
    key_map_names: Callable[[str], tuple[str, str] | None] | None = None
    """As `formats.KVCacheScheme` has it; of use where the cache is FP8."""

    @property
    def features(self) -> frozenset[str]:
        """Extras that a backend must declare to read this cache."""
        return frozenset({"head_scales"} if self.per == "head" and self.scale is None else ())


@dataclass(frozen=True, kw_only=True, eq=False)
class KVScales:
    """Of one layer whose cache is FP8, float32 [G]: a key is what is stored times `k`, a value is
    what is stored times `v`."""

    k: Tensor
    v: Tensor

    def widen(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys and values [2, N, G, D] of the FP8 cache as what they stand for."""
        return stored.to(dtype) * torch.stack((self.k, self.v))[:, None, :, None]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyMaps:
    """Matrices [D, D] of one layer that bring its keys into a form in which rounding them costs
    less: q @ `q` and k @ `k` take the place of q and k, once those are turned. `q` @ `k`.T is the
    identity, so scores stay. Rotations are such (R3 of SpinQuant, arXiv 2405.16406).
    """

    q: Tensor
    k: Tensor


def mapped(x: Tensor, matrix: Tensor) -> Tensor:
    """x [T, N, D] @ matrix [D, D], rounded to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ matrix.to(wide)).to(x.dtype)


def narrow(x: Tensor, scale: Tensor) -> Tensor:
    """x [T, G, D] as an FP8 cache stores it: x / scale float32 [G], to the nearest value of
    float8_e4m3fn, its largest one where that is exceeded. NaN stays."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What one attention layer keeps per token on this rank, before any layout."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """A named form of one layer's cache."""

    name: str
    meaning: str
    shape: Callable[[CacheSpec, int], tuple[int, ...]]
    """Of the cache of a layer with so many slots."""


CACHE_LAYOUTS: Mapping[str, CacheLayout] = {
    layout.name: layout
    for layout in (
        CacheLayout(
            name="slots",
            meaning="[2, S, G, D]: keys, then values; slot = block id * block size + offset",
            shape=lambda spec, num_slots: (2, num_slots, spec.num_kv_heads, spec.head_size),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """Fixed properties of one attention layer on this rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` before it."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""

    @property
    def features(self) -> frozenset[str]:
        """Extras that a backend must declare to serve this layer."""
        names = ("sliding_window", "soft_cap")
        return frozenset(name for name in names if getattr(self, name))


class AttentionLayer(Protocol):
    """What a step knows of the layer that calls it: `rackmount_registry.nn.Attention`, or a
    stand-in."""

    index: int
    """Place among the model's attention layers."""
    params: AttentionParams
    kv_scales: KVScales | None
    """There exactly where the cache is FP8."""

    def store(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """Head norms and rotary embedding of q [T, H, D] and k [T, G, D] at the step's positions;
        keys and values go into their slots, and the turned q is given back."""


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What a backend is built from, once per engine."""

    layers: frozenset[AttentionParams]
    """The distinct layers that it serves."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, kw_only=True)
class DeviceTables:
    """A batch's metadata on the device. Only the engine writes to it."""

    query_start_loc: Tensor
    """int32 [R + 1]."""
    seq_lens: Tensor
    """int32 [R]."""
    block_table: Tensor
    """int32 [R, max blocks per sequence]: of request r the block ids, as far as it is long; what
    stands behind them is of no meaning."""


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """One step as attention sees it: R requests, their T tokens flat, one KV group.

    Request r owns the tokens `query_start_loc[r] : query_start_loc[r + 1]`, the last of which is
    token `seq_lens[r] - 1` of its sequence, and its blocks are `block_table[rows[r]]`. The host's
    table is the engine's persistent one: it is read in place, never kept.
    """

    query_start_loc: np.ndarray
    """int32 [R + 1]."""
    seq_lens: np.ndarray
    """int32 [R], this step's tokens included."""
    rows: np.ndarray
    """int32 [R]."""
    block_table: np.ndarray
    """int32 [rows, max blocks per sequence]."""
    on_device: DeviceTables | None
    """For backends whose descriptor says that metadata is built on the device; None for others."""
    is_static: bool = False
    """The step is captured, or replayed, as a CUDA graph: R requests of one token each, the last
    ones perhaps padding (one token of context, whose values do not matter). Static batches of equal
    R come with `on_device` at equal addresses."""


class AttentionBackend(Protocol):
    """Plan once per step on the host, then run once per layer.

    It is made before weights load: what must be compiled may be, in threads, from there on.
    """

    def plan(self, batch: AttentionBatch) -> Any:
        """All host work of the step. Raises nothing for any batch that the scheduler can make.

        For a static batch a backend of "device" metadata is asked at the capture alone, so that
        nothing may follow from the lengths on the host; one of "host" metadata is asked before each
        replay too, and renews what it gave for that R in place.
        """

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: Any,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each request's cached tokens -> [T, H, D].

        `scales` are there exactly where the cache is FP8; those of a layer stay the same object.
        Reads no slot past `seq_lens`; unused slots may hold NaN. Enqueues work on the current
        stream alone, and never waits for it.
        """
