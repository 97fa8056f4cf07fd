"""Binding, tracing and memory: a draft becomes a model that waits for its weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from rackmount_registry.mount.draft import Draft
from rackmount_registry.mount.fuse import fuse
from rackmount_registry.mount.parts import Parts
from rackmount_registry.mount.trace import trace
from rackmount_registry.mount.wanted import keep_wanted
from rackmount_registry.nn.socket import Binding
from rackmount_registry.step import Step


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A model of one rank, ready once `fill` has run."""

    draft: Draft
    device: torch.device
    fused: fx.GraphModule

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] of the current step -> hidden states [W, hidden] of the tokens that it wants (see
        `Step.wanted`), of all T where it names none."""
        hidden: Tensor = self.fused(ids)
        return hidden

    def logits(self, rows: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, vocabulary]."""
        logits: Tensor = self.draft.model.logits(rows)  # type: ignore[operator]  # a model file's own method
        return logits


def assemble(
    draft: Draft, parts: Parts, step: Step, *, device: torch.device, max_positions: int
) -> Mounted:
    """Binds every socket to the chosen parts and traces the fused step; takes no memory for weights
    yet."""
    binding = Binding(
        ops=parts.ops,
        step=step,
        linear=parts.linear,
        epilogues=parts.epilogues,
        prologues=parts.prologues,
        experts=parts.experts,
        max_positions=max_positions,
        dtype=draft.dtype,
        device=device,
    )
    for socket in draft.sockets:
        socket.bind(binding)
    traced = trace(draft.model)
    keep_wanted(traced, step)
    fuse(traced)
    return Mounted(draft=draft, device=device, fused=traced)
