"""From the host to a device and back, without either waiting for the other.

On a GPU, copies have streams of their own, ahead of that of the kernels and behind it: between two
steps of an H200, a copy each way and what followed them took 37 us while they were on one stream
(`benchmarks/results/h200/step_profile_moe_gptq.json`, batch 1).
"""

from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A C-contiguous array as a tensor on the device, for the current stream.

    A GPU gets a copy, from pinned memory that torch's host allocator keeps until the copy is done:
    the array is free at once, and the host never waits. On a CPU the tensor is the array's own
    memory: hand over one that stays as it is.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    kernels, copies = torch.cuda.current_stream(device), _copies(device, "up")
    with torch.cuda.stream(copies):
        tensor = host.pin_memory().to(device, non_blocking=True)
    kernels.wait_stream(copies)
    tensor.record_stream(kernels)
    return tensor


def upload_into(target: Tensor, array: np.ndarray) -> None:
    """The same into memory that is there: `target` has the array's shape and dtype."""
    given = upload(array, target.device)
    if target.device.type == "cpu":
        target.copy_(given)
    else:
        torch.add(given, 0, out=target)  # a kernel: `copy_` asks the engine for copies


def fetch(tensor: Tensor) -> Tensor:
    """The tensor on the host, to be read once an `arrival` has come that was marked later. Waits
    for nothing. What writes to the tensor again comes behind `await_fetched`."""
    if tensor.device.type == "cpu":
        return tensor
    copies = _copies(tensor.device, "down")
    copies.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(copies):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(copies)
    return host


def await_fetched(device: torch.device) -> None:
    """Lets the current stream wait until all is copied that was fetched."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).wait_stream(_copies(device, "down"))


def arrival(device: torch.device) -> torch.cuda.Event | None:
    """What tells that all has run that the current stream was given, and has come that was fetched;
    None on a CPU, where it has."""
    if device.type == "cpu":
        return None
    copies = _copies(device, "down")
    copies.wait_stream(torch.cuda.current_stream(device))
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
    event.record(copies)
    return event


@cache
def _copies(device: torch.device, way: Literal["up", "down"]) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
