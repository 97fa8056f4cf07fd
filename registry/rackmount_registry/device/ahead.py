"""Kernels that are compiled in threads while others are, or while weights still load.

Without Triton's cache a model's products take some thirty kernels of half a second each; the
compiler leaves Python's lock alone for most of that.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


class AheadCompiler:
    """Compiles a kernel once for each key. Threads are there from the first one to `wait`."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._started: dict[Hashable, Future[Any]] = {}

    def start(self, kernel: JITFunction, key: Hashable, arguments: dict[str, Any]) -> None:
        """Begins to compile `kernel` as a launch with these arguments would, on the device that is
        current now, unless that was begun already."""
        if key in self._started:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                len(os.sched_getaffinity(0)), initializer=_enter_device()
            )
        self._started[key] = self._pool.submit(kernel.warmup, grid=(1,), **arguments)

    def wait(self) -> None:
        """Until all is compiled; raises what the compiler raised."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        try:
            for future in list(self._started.values()):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def traits(kernel: JITFunction, arguments: Mapping[str, Any]) -> Hashable:
    """All that `kernel` may be compiled for in a launch whose tensors begin where wide loads may: a
    key for `AheadCompiler`."""
    free = getattr(kernel, "do_not_specialize", ())  # what is interpreted has none
    return kernel.__name__, *(
        (name, _trait(value)) for name, value in arguments.items() if name not in free
    )


def _trait(value: Any) -> Hashable:
    match value:
        case Tensor():
            return value.dtype
        case TensorDescriptor():
            return value.base.dtype, tuple(value.block_shape)
    return value


def _enter_device() -> Callable[[], None] | None:
    """What makes this thread's GPU another thread's, where there is one: a new thread begins on the
    first."""
    if not torch.cuda.is_initialized():
        return None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
