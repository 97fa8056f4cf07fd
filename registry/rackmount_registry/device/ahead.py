"""Kernels that are compiled in threads while others are, or while weights still load.

Without Triton's cache a model's products take some thirty kernels of half a second each; the
compiler leaves Python's lock alone for most of that.
"""

import os
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from triton.runtime.jit import JITFunction


class AheadCompiler:
    """Compiles a kernel once for each key. Threads are there from the first one to `wait`."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._started: dict[Hashable, Future[Any]] = {}

    def start(self, kernel: JITFunction, key: Hashable, arguments: dict[str, Any]) -> None:
        """Begins to compile `kernel` as a launch with these arguments would, unless that was begun
        already."""
        if key in self._started:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._started[key] = self._pool.submit(kernel.warmup, grid=(1,), **arguments)

    def wait(self) -> None:
        """Until all is compiled; raises what the compiler raised."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        try:
            for future in self._started.values():
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
