"""Ranks without processes: each is a thread, and collectives meet at a barrier."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

PATIENCE_S = 30.0
"""A rank that waits longer for the others raises `threading.BrokenBarrierError`."""


class Member:
    """One rank of a `ThreadGroup`: a `rackmount_registry.axes.Group`."""

    def __init__(self, group: "ThreadGroup", rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size
        self.calls: Counter[str] = Counter()
        """Collectives that this rank took part in, by name."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        return torch.stack(self._group.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls["all_gather"] += 1
        return torch.cat(self._group.exchange(self.rank, x), -1)


class ThreadGroup:
    """`size` ranks. Mount `members[r]` one after another (tracing is not thread-safe), then `run`
    them together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members = [Member(self, rank) for rank in range(size)]
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank gives, in rank order."""
        self._given[rank] = x
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()  # nobody gives again before all have looked
        assert len({(t.shape, t.dtype) for t in given}) == 1, "ranks bring different shapes"
        return [t.clone() for t in given]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` on all ranks at once, results in rank order; the first failure is raised."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._guarded, work, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[int], T], rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            self._barrier.abort()
            raise
