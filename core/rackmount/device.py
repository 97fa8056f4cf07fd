"""From the host to a device, without either waiting for the other."""

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A C-contiguous array as a tensor on the device.

    A GPU gets a copy in the order of its stream, from pinned memory that torch's host allocator
    keeps until the copy is done: the array is free at once, and the host never waits. On a CPU the
    tensor is the array's own memory: hand over one that stays as it is.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, array: np.ndarray) -> None:
    """The same into memory that is there: `target` has the array's shape and dtype."""
    host = torch.from_numpy(array)
    target.copy_(host if target.device.type == "cpu" else host.pin_memory(), non_blocking=True)
