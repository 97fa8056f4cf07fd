"""The scale at which numbers of FP8 come closest to keys or values, found as they are seen.

A number that rounds to float8_e4m3fn is off by a share of itself that depends on where it lies
between two powers of two. So scales an octave apart round alike, and those between do not: to put
the largest magnitude at the largest number, which is usual, is among the worst. Scales are tried at
even steps of an octave, and the one with the least squared error is taken, of those that hold
everything the smallest.
"""

import torch
from torch import Tensor

from rackmount_registry.attention import FP8, FP8_MAX

STEPS = 8
"""Scales that are tried in an octave."""


class ScaleSearch:
    """Of one layer's keys or values.

    Args:
        per_head: a scale for each head, or one for all.
    """

    def __init__(self, *, per_head: bool) -> None:
        self._per_head = per_head
        self.largest = torch.zeros(1)
        """Magnitudes: float32 [scales]."""
        self._errors = torch.zeros(STEPS, 1, dtype=torch.float64)
        """Squared, by step: [STEPS, scales]."""

    def see(self, x: Tensor) -> None:
        """Takes x [T, heads, size] into account."""
        wide = x.float() if self._per_head else x.float().flatten(1).unsqueeze(1)
        largest = wide.abs().amax((0, 2))
        self.largest = torch.maximum(self.largest.to(x.device), largest)
        off = [
            (_rounded(wide, scale.unsqueeze(-1)) - wide).pow(2).sum((0, 2), dtype=torch.float64)
            for scale in _candidates(largest)
        ]
        self._errors = self._errors.to(x.device) + torch.stack(off)

    def scales(self) -> Tensor:
        """float32 [heads], or [1]; 1 for what was never other than 0."""
        best = self._errors.argmin(0, keepdim=True)
        return _candidates(self.largest).gather(0, best)[0]


def _candidates(largest: Tensor) -> Tensor:
    """[n] -> [STEPS, n]: of each step the smallest scale by which `largest` stays in range."""
    steps = torch.exp2(torch.arange(STEPS, device=largest.device) / STEPS).unsqueeze(-1)
    exact = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return steps * torch.exp2(torch.ceil(torch.log2(exact / steps)))


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
