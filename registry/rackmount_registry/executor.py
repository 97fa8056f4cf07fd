"""Executors: how the ranks of an engine are run, and how they are asked to work.

An executor knows nothing of models: it brings a `Program` up in each rank, carries messages to all
of them, and answers back. The engine core gives the program and the codec of its messages.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rackmount_registry.axes import Group
from rackmount_registry.errors import RackmountError


class RankError(RackmountError):
    """A rank that failed, died, stopped or never came. All ranks have ended when it is raised."""

    def __init__(self, rank: int, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        """Of the exception in the rank, as text; empty where there was none."""
        if traceback:
            self.add_note(f"In rank {rank}:\n{traceback.rstrip()}")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place among the others."""

    rank: int
    num_ranks: int
    device: str
    """Of this rank alone: "cpu" or "cuda:N"."""
    group: Group
    """All ranks."""


@runtime_checkable
class Pending(Protocol):
    """An answer that is on its way, as when a device still computes it."""

    def ready(self) -> bool:
        """Whether `result` would not wait. Does not wait itself."""

    def result(self) -> Any:
        """The answer. Waits for it, and raises what went wrong. Called once, or never where nobody
        wants it any more."""


class Program(Protocol):
    """What a rank runs, built in it by `factory(seat, payload, live)`; see `Launch`."""

    def answer(self, request: Any) -> Any:
        """Carries out a request, and gives the answer or a `Pending` of it.

        All ranks are given the same requests in the same order. The next request may come while
        answers are pending; results are taken in order.
        """

    def close(self) -> None:
        """Gives memory and files back."""


class Codec(Protocol):
    """Messages as bytes. Nothing that decoding reads may run code."""

    def encode(self, message: Any) -> bytes: ...
    def decode(self, data: bytes) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What an executor brings up."""

    program: str
    """"package.module:factory" of the program."""
    codec: str
    """"package.module:factory" of the codec of `payload`, requests and answers; called without
    arguments."""
    payload: Any
    """Handed to the program of every rank: the driver's, also where each rank could have its
    own."""
    live: Any = None
    """Objects of this process that a program in it may use instead of making its own. None in
    others."""
    num_ranks: int
    device: str
    """"cpu", "cuda" (each rank its own GPU), or "cuda:N" for a single rank."""


class Executor(Protocol):
    """Ranks at work; built by `factory(launch)`, which returns once every rank's program stands.

    Raises:
        RankError: at any time; the executor is closed then, and each later call raises again.
    """

    def call(self, request: Any) -> list[Any]:
        """Every rank's answer, in rank order: for start-up, with nothing submitted."""

    def submit(self, request: Any) -> None:
        """All ranks begin to carry `request` out. Returns without waiting for it, and raises
        nothing of the program."""

    def collect(self) -> Any:
        """Rank 0's answer to the oldest request that was submitted and not yet collected.

        Raises what the program raised for that request, where the executor outlives it.
        """

    def forget(self) -> None:
        """Whatever was submitted and not collected is nobody's any more, as after an interrupt:
        the next answer is that to the next request. Does not wait."""

    def close(self) -> None:
        """Ends the ranks, and leaves nothing of them. May be called twice."""
