"""Scales of quantized tensors: what is checked of all of them."""

import torch
from torch import Tensor

from rackmount_registry.errors import CheckpointError


def check_scales(scales: Tensor, what: str) -> Tensor:
    """`scales` as they are.

    Raises:
        CheckpointError: one of them is not finite, or not above 0; the first such is shown.
    """
    wide = scales.float()
    if wide.is_meta or not wide.numel():
        return scales
    legal = torch.isfinite(wide) & (wide > 0)
    if not bool(legal.all()):
        value = wide[~legal][0].item()
        count = int((~legal).sum())
        raise CheckpointError(
            f"{what} must be finite and above 0, and {count} of {wide.numel()} are not: {value}"
        )
    return scales
