"""Paged attention: what a backend is given and what it promises.

Shapes: T tokens of the step, R requests, H query heads, G key/value heads, D head size, S slots of
the KV pool.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


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
class AttentionParams:
    """Fixed properties of one attention layer on this rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` before it."""

    @property
    def features(self) -> frozenset[str]:
        """Extras that a backend must declare to serve this layer."""
        return frozenset({"sliding_window"} if self.sliding_window else ())


class AttentionLayer(Protocol):
    """What a step knows of the layer that calls it: `rackmount_registry.nn.Attention`, or a
    stand-in."""

    index: int
    """Place among the model's attention layers."""
    params: AttentionParams

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Head norms and rotary embedding of q [T, H, D] and k [T, G, D] at the step's
        positions."""


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What a backend is built from, once per engine."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """One step as attention sees it: R requests, their tokens flat, one KV group.

    Host arrays are for planning; `slot_mapping` is for the device. Request r owns the tokens
    `query_start_loc[r] : query_start_loc[r + 1]`, the last of which is token `seq_lens[r] - 1` of
    its sequence, and its blocks are `block_table[rows[r]]`. The table is the engine's persistent
    one: it is read in place, never kept.
    """

    query_start_loc: np.ndarray
    """int32 [R + 1]."""
    seq_lens: np.ndarray
    """int32 [R], this step's tokens included."""
    rows: np.ndarray
    """int32 [R]."""
    block_table: np.ndarray
    """int32 [max_num_seqs, max blocks per sequence]."""
    slot_mapping: Tensor
    """int64 [T] on the device: block id * block size + offset of each token."""


class AttentionBackend(Protocol):
    """Plan once per step on the host, then run once per layer."""

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache in `spec.dtype`; its size is linear in `num_blocks`."""

    def plan(self, batch: AttentionBatch) -> Any:
        """All host work of the step. Raises nothing for any batch that the scheduler can make."""

    def write(self, cache: Tensor, k: Tensor, v: Tensor, plan: Any) -> None:
        """Puts k and v [T, G, D] into their slots."""

    def run(self, q: Tensor, cache: Tensor, plan: Any, params: AttentionParams) -> Tensor:
        """Causal attention of q [T, H, D] over each request's cached tokens -> [T, H, D].

        Reads no slot past `seq_lens`; unused slots may hold NaN.
        """
