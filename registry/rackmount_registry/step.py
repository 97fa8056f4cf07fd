"""The step as sockets see it, and the plain reference step that needs no engine.

A `Step` is given to every socket at mount. It knows the tokens that are being computed, so
positions, KV addresses and padding travel neither through globals nor through every layer's
arguments.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rackmount_registry.attention import FP8, AttentionLayer, AttentionParams


class Step(Protocol):
    """What the running step offers to sockets. Its tensors change from step to step, the object
    stays."""

    positions: Tensor
    """Integers [T]: place of each token in its sequence."""
    slots: Tensor
    """Integers [T]: where each token's KV goes; below 0 for padding."""
    wanted: Tensor | None
    """Integers [W]: the tokens whose hidden states are asked for; None for all."""

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Head norms, rotary and the KV write by `layer.store`, then attention.

        q [T, H, D], k and v [T, G, D], as projected -> [T, H, D].
        """


def wanted_rows(step: Step, x: Tensor) -> Tensor:
    """Of x [T, ...] the rows of the tokens that the step wants."""
    return x if step.wanted is None else x.index_select(0, step.wanted)


class ReferenceStep:
    """Whole sequences at once, no cache, float64-safe: the oracle for models, backends and
    quantization schemes."""

    def __init__(self) -> None:
        self.positions = self.slots = torch.empty(0, dtype=torch.int64)
        self.wanted: Tensor | None = None
        self._lengths: list[int] = []

    def begin(self, lengths: Sequence[int]) -> None:
        """The next forward computes sequences of these lengths, laid flat one after another."""
        self._lengths = list(lengths)
        ranges = [torch.arange(n) for n in self._lengths]
        self.positions = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)
        self.slots = torch.arange(len(self.positions))  # every token has its own

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scales = layer.kv_scales
        cache = torch.stack((k, v)).to(k.dtype if scales is None else FP8)
        q = layer.store(q, k, v, cache, self.slots)
        if scales is not None:
            cache = scales.widen(cache, torch.promote_types(q.dtype, torch.float32))
        outs = [
            attend_causally(each_q, each_k, each_v, layer.params)
            for each_q, each_k, each_v in zip(
                *(torch.split(t, self._lengths) for t in (q, *cache)), strict=True
            )
        ]
        return torch.cat(outs) if outs else q


def attend_causally(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Causal attention of one sequence by its definition: q [n, H, D] are the last n of k, v [m, G,
    D] -> [n, H, D]."""
    n, m = q.shape[0], k.shape[0]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = params.num_heads // params.num_kv_heads
    k, v = (t.to(wide).repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.to(wide), k) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    ahead = torch.arange(m) - torch.arange(m - n, m).unsqueeze(1)
    hidden = ahead > 0
    if params.sliding_window is not None:
        hidden |= ahead <= -params.sliding_window
    scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).to(q.dtype)
