"""Kernels that are compiled in threads while others are, or while weights still load.

Without Triton's cache an engine compiles some fifty kernels of half a second to four each, and for
every list of arguments the C function that launches them, by a C compiler. Python's lock is held
for a seventh of that: processes of their own would take longer to import torch than they saved.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_hashing = Lock()


class AheadCompiler:
    """Compiles a kernel once for each key. Threads are there from the first one to `wait`. Engines
    in threads of their own may share one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._started: dict[Hashable, Future[Any]] = {}

    def start(self, kernel: JITFunction, key: Hashable, arguments: dict[str, Any]) -> None:
        """Begins to compile `kernel` as a launch with these arguments would, on the device that is
        current now, unless that was begun already."""
        with self._lock:
            if key in self._started:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    len(os.sched_getaffinity(0)), initializer=_enter_device()
                )
            self._started[key] = self._pool.submit(_make, kernel, arguments)

    def wait(self) -> None:
        """Until all is compiled; raises what the compiler raised. What failed is forgotten: who
        asks next does not get another's error."""
        if self._pool is None:
            return
        with self._lock:
            pool, self._pool = self._pool, None
            started = dict(self._started)
        try:
            for future in started.values():
                if not future.cancelled():
                    future.result()
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
            with self._lock:
                for key, future in started.items():
                    if future.done() and (future.cancelled() or future.exception()):
                        self._started.pop(key, None)


def _make(kernel: JITFunction, arguments: dict[str, Any]) -> None:
    """All that the first launch would do before it launches."""
    with _hashing:  # Triton keeps its hash of itself, but each thread that asks meanwhile takes one
        triton_key()
    compiled = kernel.warmup(grid=(1,), **arguments)
    if compiled is not None:  # what is interpreted is not compiled
        _ = compiled.run  # builds what launches it, and loads both


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
