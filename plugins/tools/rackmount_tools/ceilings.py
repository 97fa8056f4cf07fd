"""What the device reaches where nothing but memory or nothing but arithmetic binds it: measured in
the same run as what is held against it."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from rackmount_tools.clocks import clock_of

REPEATS = 20
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""Beyond every cache."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    read: float
    """Bytes per second of a sum over memory."""
    copy: float
    """Bytes per second of a copy: those read and those written."""
    matmul: float
    """Floating point operations per second of a large square product in the model's dtype."""

    @property
    def bandwidth(self) -> float:
        """The better of the two, in bytes per second."""
        return max(self.read, self.copy)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Takes some gigabytes of a GPU's memory, and gives them back."""
    num_bytes, size = COPIED_BYTES[device.type], MATMUL_SIZE[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    factor = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(factor)
    read_s = seconds(source.sum, device)
    copy_s = seconds(partial(target.copy_, source), device)
    matmul_s = seconds(partial(torch.mm, factor, factor, out=product), device)
    del source, target, factor, product
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(
        read=num_bytes / read_s, copy=2 * num_bytes / copy_s, matmul=2 * size**3 / matmul_s
    )


def seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of `run` on the device, warmed up; `run` is to take far longer than its
    launch."""
    clock = clock_of(device)
    for _ in range(3):
        run()
    for _ in range(repeats):
        clock.mark()
        run()
    clock.mark()
    return statistics.median(clock.intervals())
