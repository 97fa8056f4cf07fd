"""Kernels that are compiled in threads."""

import os
import threading
import time
from functools import cache
from typing import Any

import pytest
import torch

import rackmount_registry.device.ahead as device_ahead
from rackmount_registry.device.ahead import AheadCompiler, traits


class Compiled:
    """Stands in for a kernel; notes what it was asked to compile, and by which threads."""

    __name__ = "kernel"
    do_not_specialize = ("M",)

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.threads: set[int] = set()
        self.loaded: set[int] = set()

    def warmup(self, **arguments: Any) -> "Compiled":
        self.asked.append(arguments)
        self.threads.add(threading.get_ident())
        return self

    @property
    def run(self) -> None:
        """Triton builds a kernel's launcher, and loads both, when this is first read."""
        self.loaded.add(threading.get_ident())


def test_threads_compile_for_the_device_of_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins on the first GPU, whatever a rank's own is."""
    entered: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: entered.update({threading.get_ident(): device})
    )
    ahead, kernel = AheadCompiler(), Compiled()
    for key in range(4):
        ahead.start(kernel, key, {"M": key})
    ahead.wait()
    assert threading.get_ident() not in kernel.threads and kernel.loaded == kernel.threads
    assert kernel.threads <= entered.keys() and set(entered.values()) == {3}


def test_threads_take_the_hash_of_triton_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a third of a second of each, and of Python's lock."""
    taken: list[int] = []

    @cache
    def hash_of_triton() -> str:
        taken.append(threading.get_ident())
        time.sleep(0.1)
        return ""

    monkeypatch.setattr(device_ahead, "triton_key", hash_of_triton)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    ahead, kernel = AheadCompiler(), Compiled()
    for key in range(4):
        ahead.start(kernel, key, {"M": key})
    ahead.wait()
    assert len(taken) == 1 and len(kernel.asked) == 4


def test_launches_differ_in_what_kernels_are_compiled_for() -> None:
    kernel, x = Compiled(), torch.zeros(2, 4)
    first = traits(kernel, {"x": x, "bias": None, "M": 2, "N": 4})
    assert first == traits(kernel, {"x": x[1:], "bias": None, "M": 1, "N": 4})
    for other in (
        {"x": x.half(), "bias": None, "M": 2, "N": 4},
        {"x": x, "bias": x, "M": 2, "N": 4},
        {"x": x, "bias": None, "M": 2, "N": 8},
    ):
        assert traits(kernel, other) != first
    assert len({first, traits(kernel, {"x": x, "bias": None, "M": 3, "N": 4})}) == 1


class Broken(Compiled):
    def warmup(self, **arguments: Any) -> "Compiled":
        raise RuntimeError("out of shared memory")


def test_what_cannot_be_compiled_is_told_once_to_who_waits() -> None:
    """An engine of the process that comes later asks for other kernels, or for these again."""
    ahead, kernel = AheadCompiler(), Compiled()
    ahead.start(Broken(), "one", {})
    with pytest.raises(RuntimeError, match="shared memory"):
        ahead.wait()
    ahead.start(kernel, "two", {})
    ahead.wait()
    ahead.start(kernel, "one", {})
    ahead.wait()
    assert len(kernel.asked) == 2
