"""What the operations of this set are: functions that list what they launch, so that threads can
compile it before the first call."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor
from triton.runtime.jit import JITFunction

from rackmount_registry.device.ahead import AheadCompiler, traits

P = ParamSpec("P")
R = TypeVar("R")
Launch = tuple[JITFunction, tuple[int, ...], dict[str, Any]]
"""A kernel, its grid and its arguments."""


class Operation(Generic[P, R]):
    """Launches what a function of its arguments lists.

    Args:
        plan: gives the result, which is yet to be computed, and the launches that compute it.
        by_row: that many arguments come first of which each is a tensor of as many rows, which may
            lie apart.
        rows: numbers of rows for which kernels differ: at any other one of theirs is launched.
    """

    def __init__(
        self,
        plan: Callable[P, tuple[R, list[Launch]]],
        *,
        by_row: int = 0,
        rows: tuple[int, ...] = (1,),
    ) -> None:
        self._plan, self._by_row, self._rows = plan, by_row, rows
        self._ahead = AheadCompiler()

    def prepare(self, *arguments: Any) -> None:
        """Begins to compile what calls with such arguments launch; see `ops.prepare`."""
        given, rest = arguments[: self._by_row], arguments[self._by_row :]
        for rows in self._rows:
            alike = (
                each.new_empty_strided(_with_rows(each, rows), each.stride()) for each in given
            )
            for kernel, _, named in self._plan(*alike, *rest)[1]:  # type: ignore[call-arg]  # P again
                self._ahead.start(kernel, traits(kernel, named), named)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        result, launches = self._plan(*arguments, **named)
        self._ahead.wait()
        for kernel, grid, given in launches:
            kernel[grid](**given)
        return result


def _with_rows(tensor: Tensor, rows: int) -> tuple[int, ...]:
    return rows, *tensor.shape[1:]
