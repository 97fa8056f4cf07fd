"""A process for each rank, on this host."""

import os
import time
import weakref
from collections import defaultdict
from typing import Any, NoReturn

import msgspec
import torch

from rackmount_executors.crew import Crew
from rackmount_executors.frames import REQUEST, Frame, Kind, Orders, Trouble
from rackmount_executors.options import MultiprocessOptions
from rackmount_executors.ring import RingClosed
from rackmount_registry.errors import ConfigError
from rackmount_registry.executor import Codec, Launch, RankError
from rackmount_registry.offers import import_attribute

POLL_S = 0.25
GRACE_S = 0.5
"""After a first failure, for others to be heard: the first that is heard need not be the cause."""


class MultiprocessExecutor:
    """A `rackmount_registry.executor.Executor`: the ranks hear a request by a ring in shared
    memory, and answer each on a line of its own.

    The ranks end with `close`, with this object, with the interpreter, and when the process dies.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        RankError: a rank did not come in time, failed, died or stopped; all are ended then.
    """

    def __init__(self, launch: Launch, *, options: MultiprocessOptions) -> None:
        _require_devices(launch)
        self._options = options
        self._codec: Codec = import_attribute(launch.codec, "the codec of the ranks")()
        self._number = 0
        """Of the newest request."""
        self._oldest = 1
        """Number of the first request whose answers are not collected."""
        self._answers: dict[int, dict[int, bytes]] = defaultdict(dict)
        """By number and rank, as they have come."""
        self._failure: RankError | None = None
        self._all_joined = False
        self._crew = Crew(launch.num_ranks)
        self._end = weakref.finalize(self, self._crew.end)
        payload = self._codec.encode(launch.payload)

        def orders(rank: int, port: int) -> Orders:
            return Orders(
                rank=rank,
                num_ranks=launch.num_ranks,
                device=launch.device,
                port=port,
                start_timeout_s=options.start_timeout_s,
                spin_s=_spin_s(launch.device) if options.spin_s is None else options.spin_s,
                driver_pid=os.getpid(),
                program=launch.program,
                codec=launch.codec,
                payload=payload,
            )

        try:
            self._crew.start(orders)
            self._await_programs()
        except BaseException:
            self._crew.end(0)
            raise

    def call(self, request: Any) -> list[Any]:
        self._send(request, all_answer=True)
        return self._collect(self._crew.num_ranks)

    def submit(self, request: Any) -> None:
        self._send(request, all_answer=False)

    def collect(self) -> Any:
        self._check_open()
        return self._collect(1)[0]

    def forget(self) -> None:
        self._oldest = self._number + 1
        self._answers.clear()

    def close(self) -> None:
        self._end()

    def _send(self, request: Any, *, all_answer: bool) -> None:
        self._check_open()
        self._number += 1
        header = REQUEST.pack(self._number, all_answer)
        try:
            # A rank that is full of answers reads no further: they are heard meanwhile.
            self._crew.send(header + self._codec.encode(request), lambda: self._hear(0))
        except RingClosed:
            self._fail([])

    def _collect(self, num_ranks: int) -> list[Any]:
        """What the first `num_ranks` answer to the oldest request, in rank order."""
        assert self._oldest <= self._number, "nothing was submitted"
        while len(answers := self._answers[self._oldest]) < num_ranks:
            self._hear(POLL_S)
        del self._answers[self._oldest]
        self._oldest += 1
        return [self._codec.decode(answers[rank]) for rank in range(num_ranks)]

    def _hear(self, timeout_s: float) -> None:
        """Keeps the answers that come next, but those that nobody waits for any more."""
        for frame in self._frames(timeout_s):
            assert frame.kind is Kind.ANSWER and frame.number <= self._number, frame
            if frame.number >= self._oldest:
                self._answers[frame.number][frame.rank] = frame.body

    def _check_open(self) -> None:
        if self._failure:
            raise RankError(self._failure.rank, f"all ranks have ended, since {self._failure}")
        if self._crew.ended:
            raise RankError(0, "all ranks have ended: the executor is closed")

    def _await_programs(self) -> None:
        """Until the program of every rank stands. Building it takes as long as it takes; only the
        meeting before it has a deadline."""
        seen = [-1] * self._crew.num_ranks
        deadline = time.monotonic() + self._options.start_timeout_s
        while (least := min(seen)) < Kind.ANSWER:
            self._all_joined = least == Kind.JOINED
            if not self._all_joined and time.monotonic() > deadline:
                late = [rank for rank, kind in enumerate(seen) if kind == least]
                names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                self._raise(
                    late[0],
                    f"{names} of {len(seen)} did not come within "
                    f"{self._options.start_timeout_s} s, the start_timeout_s of "
                    "executor.multiprocess",
                )
            for frame in self._frames(POLL_S):
                seen[frame.rank] = frame.kind
        self._all_joined = True

    def _frames(self, timeout_s: float) -> list[Frame]:
        """What ranks say next, if they do so in time. Raises where one is in trouble."""
        frames = self._crew.receive(timeout_s)
        if troubles := [frame for frame in frames if frame.kind >= Kind.ERROR]:
            self._fail(troubles)
        if not frames:
            self._check_signs()
        return frames

    def _check_signs(self) -> None:
        """Only once all have joined: importing torch may hold a whole process up for long."""
        if not self._all_joined:
            return
        for rank in range(self._crew.num_ranks):
            silence = self._crew.silence(rank)
            if silence > self._options.silence_timeout_s:
                pid = self._crew.members[rank].process.pid
                self._raise(
                    rank,
                    f"rank {rank} (process {pid}) has given no sign of life for {silence:.1f} s",
                )

    def _fail(self, troubles: list[Frame]) -> NoReturn:
        """Finds the rank that failed first, and raises for it. One that died without a word comes
        before those that lost it."""
        deadline = time.monotonic() + GRACE_S
        while (left := deadline - time.monotonic()) > 0:
            troubles += [f for f in self._crew.receive(left) if f.kind >= Kind.ERROR]
        errors = {
            frame.rank: msgspec.msgpack.decode(frame.body, type=Trouble)
            for frame in troubles
            if frame.kind is Kind.ERROR
        }
        for frame in troubles:
            if frame.rank not in errors:
                self._raise(frame.rank, f"rank {frame.rank} {self._crew.fate(frame.rank)}")
        if not errors:
            self._raise(0, "a rank has left the ring, and none says why")
        rank, first = min(errors.items(), key=lambda item: item[1].time)
        self._raise(rank, f"rank {rank}: {first.summary}", first.traceback)

    def _raise(self, rank: int, message: str, traceback: str = "") -> NoReturn:
        self._failure = RankError(rank, message, traceback)
        self._crew.end(0)
        raise self._failure


def _spin_s(device: str) -> float:
    """Between two steps there is less. On CPUs a rank that spins would take the cores of others."""
    return 0.0 if device == "cpu" else 0.002


def _require_devices(launch: Launch) -> None:
    if launch.device == "cuda" and launch.num_ranks > (here := torch.cuda.device_count()):
        raise ConfigError(
            f"{launch.num_ranks} ranks need a GPU each, and {here} are here; choose at most {here}"
        )
