"""Clocks that time what a device does, from mark to mark."""

import time
from itertools import pairwise
from typing import ClassVar

import torch

from rackmount import Engine


class HostClock:
    """Marks on the processor's clock."""

    name: ClassVar[str] = "host"

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds from mark to mark."""
        return [end - start for start, end in pairwise(self._marks)]


class DeviceClock:
    """Marks in the order of the current CUDA stream."""

    name: ClassVar[str] = "device"

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


def clock_of_steps(engine: Engine) -> HostClock | DeviceClock:
    """The clock of an engine's steps: the device's own where they run on this process's stream.
    Ranks in processes of their own leave that idle, and then the processor's has to do."""
    rack = engine.rack
    return clock_of(rack.device) if rack.executor.name == "in-process" else HostClock()
