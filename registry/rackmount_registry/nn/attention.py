"""Self-attention over grouped query heads."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rackmount_registry.attention import (
    CACHE_LAYOUTS,
    FP8,
    AttentionParams,
    CacheSpec,
    KeyMaps,
    KVScales,
)
from rackmount_registry.axes import Axis, Cut
from rackmount_registry.errors import ConfigError
from rackmount_registry.nn.rotary import Rotary
from rackmount_registry.nn.socket import Binding, Socket, Survey
from rackmount_registry.nn.storage import Storage, vector
from rackmount_registry.ops import prepare

EXAMPLE_SLOTS = 16
"""In a real cache, too, keys are apart from values by a multiple of it."""


class Attention(Socket):
    """Raw q [T, H D], k and v [T, G D] of this rank -> [T, H D].

    Owns head norms, rotary embedding and the KV write; how tokens find their context is the step's
    affair.

    Args:
        heads, kv_heads: axes whose width is the head size.
        rope: rotary embedding, None for none.
        q_norm, k_norm: checkpoint names of head norms beside this socket; both or neither.
        norm_eps: of the head norms.
        scale: of the scores; None for head size ** -0.5.
        sliding_window: tokens that a token sees, itself included; None for all.
        soft_cap: bound of the scores, approached by tanh; None for none.
    """

    uses = frozenset({"rotary_write"})

    def __init__(
        self,
        heads: Axis,
        kv_heads: Axis,
        *,
        rope: Rotary | None,
        q_norm: str | None = None,
        k_norm: str | None = None,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        assert (q_norm is None) == (k_norm is None)
        self.heads, self.kv_heads, self.rope = heads, kv_heads, rope
        self.norm_names = [name for name in (q_norm, k_norm) if name is not None]
        self.norm_eps = norm_eps
        self.scale = heads.width**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.index = -1
        """Place among the model's attention layers, set by the mount."""
        self.kv_scales: KVScales | None = None
        """There exactly where the cache is FP8; set by the mount."""
        self.key_maps: KeyMaps | None = None
        """Set by the mount, where the checkpoint has them for an FP8 cache."""
        self.answered: tuple[str, ...] = ()
        """Checkpoint tensors of a quantized cache; set by the mount."""

    def survey(self, survey: Survey) -> None:
        mesh, size = survey.mesh, self.heads.width
        if mesh.group(self.heads) != mesh.group(self.kv_heads):
            raise ConfigError(
                f"{self.path}: query heads and KV heads must be split by one group of ranks, or "
                "none: a query head would miss its KV head"
            )
        self.params = AttentionParams(
            num_heads=mesh.cut(self.heads).size // size,
            num_kv_heads=mesh.cut(self.kv_heads).size // size,
            head_size=size,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        cut = mesh.cut(self.kv_heads)
        self.local_kv_heads = Cut(cut.start // size, cut.stop // size)
        names = [f"{self.sibling(name)}.weight" for name in self.norm_names]
        self.norms = [vector(name, size, mesh) for name in names]
        """Of single query and key heads (Qwen3), stored beside the socket: two, or none."""

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        """What this layer keeps per token."""
        return CacheSpec(
            num_kv_heads=self.params.num_kv_heads, head_size=self.params.head_size, dtype=dtype
        )

    def bind(self, binding: Binding) -> None:
        self.ops, self.step = binding.ops, binding.step
        self.dtype, self.device = binding.dtype, binding.device
        self.table = binding.rope_table(self.rope) if self.rope else None

    def storages(self) -> Iterator[Storage]:
        return iter(self.norms)

    def answers_for(self) -> Iterator[str]:
        return iter(self.answered)

    def finish(self) -> None:
        stored = self.dtype if self.kv_scales is None else FP8
        shape = CACHE_LAYOUTS["slots"].shape(self.cache_spec(stored), EXAMPLE_SLOTS)
        cache = torch.empty(shape, dtype=stored, device=self.device)
        q = cache.new_empty((1, self.params.num_heads, self.params.head_size), dtype=self.dtype)
        k = q[:, : self.params.num_kv_heads]
        prepare(self.ops.rotary_write, *self._write_arguments(q, k, k, cache, self.step.slots))

    def store(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """See `rackmount_registry.attention.AttentionLayer`."""
        return self.ops.rotary_write(*self._write_arguments(q, k, v, cache, slots))

    def _write_arguments(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor
    ) -> tuple[Any, ...]:
        """Of `ops.rotary_write`."""
        q_norm, k_norm = (norm.tensor for norm in self.norms) if self.norms else (None, None)
        scales, maps = self.kv_scales, self.key_maps
        return (
            q,
            k,
            v,
            self.step.positions,
            self.table,
            q_norm,
            k_norm,
            self.norm_eps,
            self.rope is not None and self.rope.interleaved,
            cache,
            slots,
            scales.k if scales else None,
            scales.v if scales else None,
            maps.q if maps else None,
            maps.k if maps else None,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = self.params.head_size
        q, k, v = (t.view(len(t), t.shape[-1] // size, size) for t in (q, k, v))
        return self.step.attend(self, q, k, v).flatten(1)
