"""Operations that are compiled before they are called."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from rackmount_backends.triton_ops.operation import Launch, Operation


class Kernel:
    """Writes down what it is asked for, and by which thread."""

    __name__ = "kernel"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []
        self.threads: set[int] = set()

    def warmup(self, *, grid: tuple[int, ...], **arguments: Any) -> None:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        self.compiled.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.launched.append(arguments)


def copying(kernel: Kernel, **differences: Any) -> Operation[[Tensor, int], Tensor]:
    def plan(x: Tensor, number: int) -> tuple[Tensor, list[Launch]]:
        out = torch.empty(x.shape)
        few = {"x": x, "out": out, "number": number, "MANY": len(x) > 8}
        return out, [(kernel, (len(x),), few)]  # type: ignore[list-item]  # a stand-in

    return Operation(plan, **differences)


def test_a_call_launches_what_was_compiled_by_then() -> None:
    kernel = Kernel()
    operation = copying(kernel)
    operation.prepare(torch.empty(1, 4), 7)
    out = operation(torch.empty(3, 4), number=7)
    assert out.shape == (3, 4) and kernel.launched[0]["out"] is out
    assert [each["number"] for each in kernel.compiled] == [7]
    assert threading.get_ident() not in kernel.threads


def test_it_is_compiled_for_all_numbers_of_rows_that_differ() -> None:
    """Whose rows lie as far apart as those that it was told of."""
    kernel = Kernel()
    operation = copying(kernel, by_row=1, rows=(1, 9))
    wide = torch.empty(1, 10, dtype=torch.float16)
    for _ in range(2):  # as layers do
        operation.prepare(wide[:, 2:6], 7)
    operation(torch.empty(1, 4), 7)
    given = [each["x"] for each in sorted(kernel.compiled, key=lambda each: each["MANY"])]
    assert [(each.shape, each.stride()) for each in given] == [
        ((1, 4), (10, 1)),
        ((9, 4), (10, 1)),
    ]
    assert {each.dtype for each in given} == {torch.float16}


def test_what_the_compiler_raised_is_raised_by_the_call() -> None:
    kernel = Kernel(RuntimeError("no registers left"))
    operation = copying(kernel)
    operation.prepare(torch.empty(1, 4), 7)
    with pytest.raises(RuntimeError, match="no registers left"):
        operation(torch.empty(1, 4), 7)
    assert not kernel.launched
