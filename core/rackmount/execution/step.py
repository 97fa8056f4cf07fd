"""The step over the paged KV cache, as sockets see it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rackmount_registry.attention import AttentionBackend, AttentionLayer


class PagedStep:
    """Hands each attention layer to the backend of the step, with its cache and the step's plan."""

    backend: AttentionBackend

    def __init__(self, device: torch.device) -> None:
        self.positions = self.slots = torch.empty(0, dtype=torch.int32, device=device)
        self.wanted: Tensor | None = None
        self.caches: list[Tensor] = []
        """One for each attention layer."""
        self.interrupt: Callable[[AttentionLayer, Tensor], Tensor] | None = None
        """What stands for attention while a forward is captured in pieces: gives where the output
        [T, H, D] will be found."""
        self._plan: Any = None

    def begin(
        self,
        positions: Tensor,
        slots: Tensor,
        backend: AttentionBackend,
        plan: Any,
        wanted: Tensor | None,
    ) -> None:
        """What the next forward computes: int32 positions and slots [T], what `backend` has planned
        for it, and int32 [W] whose hidden states are wanted, None for all."""
        self.positions, self.slots, self.wanted = positions, slots, wanted
        self.backend, self._plan = backend, plan

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `rackmount_registry.step.Step`."""
        q = layer.store(q, k, v, self.caches[layer.index], self.slots)
        return (self.interrupt or self.run)(layer, q)

    def run(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        """Attention of the turned q [T, H, D], by the step's backend."""
        cache = self.caches[layer.index]
        return self.backend.run(q, cache, self._plan, layer.params, layer.kv_scales)
