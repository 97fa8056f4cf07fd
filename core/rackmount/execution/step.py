"""The step over the paged KV cache, as sockets see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rackmount_registry.attention import AttentionBackend, AttentionLayer


@dataclass(frozen=True)
class Part:
    """Requests of a step that one backend serves."""

    backend: AttentionBackend
    plan: Any
    """What the backend planned for them."""
    tokens: slice
    """Theirs."""


class PagedStep:
    """Hands each attention layer to the backends of the step, with its cache and their plans."""

    def __init__(self, device: torch.device) -> None:
        self.positions = self.slots = torch.empty(0, dtype=torch.int32, device=device)
        self.wanted: Tensor | None = None
        self.caches: list[Tensor] = []
        """One for each attention layer."""
        self.interrupt: Callable[[AttentionLayer, Tensor], Tensor] | None = None
        """What stands for attention while a forward is captured in pieces: gives where the output
        [T, H, D] will be found."""
        self._parts: Sequence[Part] = ()

    def begin(
        self,
        positions: Tensor,
        slots: Tensor,
        parts: Sequence[Part],
        wanted: Tensor | None,
    ) -> None:
        """What the next forward computes: int32 positions and slots [T], the parts that these are,
        in order, and int32 [W] whose hidden states are wanted, None for all."""
        self.positions, self.slots, self.wanted = positions, slots, wanted
        self._parts = parts

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `rackmount_registry.step.Step`."""
        q = layer.store(q, k, v, self.caches[layer.index], self.slots)
        return (self.interrupt or self.run)(layer, q)

    def run(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        """Attention of the turned q [T, H, D], by the step's backends."""
        cache, params, scales = self.caches[layer.index], layer.params, layer.kv_scales
        outs = [
            part.backend.run(q[part.tokens], cache, part.plan, params, scales)
            for part in self._parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
