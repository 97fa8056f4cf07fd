"""Clocks that time what a device does, from mark to mark."""

import time
from itertools import pairwise

import torch


class HostClock:
    """Marks on the processor's clock."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds from mark to mark."""
        return [end - start for start, end in pairwise(self._marks)]


class DeviceClock:
    """Marks in the order of the current CUDA stream."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals(self) -> list[float]:
        """Seconds from mark to mark, once all are reached."""
        torch.cuda.synchronize()
        pairs = pairwise(self._marks)
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock of a device's own work."""
    return DeviceClock() if device.type == "cuda" else HostClock()
