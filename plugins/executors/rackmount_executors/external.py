"""Ranks that a launcher has started, torchrun or another that sets the same variables."""

import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rackmount_executors.ring import NAP_S
from rackmount_executors.torch_group import PATIENCE, leave, take_seat
from rackmount_registry.answers import Answers, attempt
from rackmount_registry.errors import ConfigError
from rackmount_registry.executor import Codec, Launch, Program
from rackmount_registry.offers import import_attribute

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExternalExecutor:
    """A `rackmount_registry.executor.Executor`: every process builds the engine, and rank 0's is
    asked. On the others this constructor serves rank 0 until it closes.

    A rank that fails ends with its exception, and then its launcher ends the others.

    Raises:
        ConfigError: no launcher set the variables, or it started another number of ranks.
        SystemExit: on ranks other than 0, when all is done.
    """

    def __init__(self, launch: Launch) -> None:
        rank, local_rank = _own_place(launch.num_ranks)
        seat = take_seat(
            rank, launch.num_ranks, device=launch.device, local_rank=local_rank, store=None
        )
        self._wire = _Wire(rank, launch.num_ranks)
        self._codec: Codec = import_attribute(launch.codec, "the codec of the ranks")()
        payload = self._codec.decode(self._wire.spread(self._codec.encode(launch.payload)))
        factory = import_attribute(launch.program, "the program of the ranks")
        self._program: Program = factory(seat, payload, launch.live)
        self._answers = Answers()
        self._end = weakref.finalize(self, _end, self._wire, self._program.close)
        if rank:
            self._serve()
            raise SystemExit(0)

    def call(self, request: Any) -> list[Any]:
        self._wire.spread(b"\1" + self._codec.encode(request))
        self._answers.put(attempt(self._program, request))
        own = self._answers.take()
        return [own, *(self._codec.decode(answer) for answer in self._wire.take_all())]

    def submit(self, request: Any) -> None:
        self._wire.spread(b"\0" + self._codec.encode(request))
        self._answers.put(attempt(self._program, request))

    def collect(self) -> Any:
        return self._answers.take()

    def forget(self) -> None:
        self._answers.forget()

    def close(self) -> None:
        self._end()

    def _serve(self) -> None:
        """Requests of rank 0, until an empty one."""
        while message := self._wire.follow(self._take_ready):
            self._answers.put(self._program.answer(self._codec.decode(message[1:])))
            if message[0]:
                self._wire.give(self._codec.encode(self._answers.take()))
        self._end()

    def _take_ready(self) -> bool:
        """Takes what answers are there, for their errors. Gives whether more are to come."""
        while self._answers and self._answers.ready():
            self._answers.take()
        return bool(self._answers)


class _Wire:
    """Bytes between rank 0 and the others, over a gloo group of their own."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if num_ranks > 1 else None

    def drop(self) -> None:
        """Lets go of the group, whose threads must end before the process begins to."""
        self._group = None

    def spread(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank."""
        if self._group is None:
            return message
        return self._pass(message, lambda t: dist.broadcast(t, 0, group=self._group))

    def follow(self, busy: Callable[[], bool]) -> bytes:
        """What rank 0 spreads next. `busy` is called now and then, as long as it is true; the
        process ends where it raises."""

        def move(t: Tensor) -> None:
            work = dist.broadcast(t, 0, group=self._group, async_op=True)
            try:
                while busy() and not work.is_completed():
                    time.sleep(NAP_S)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)  # in order, it would wait for rank 0's next word
            work.wait()

        return self._pass(b"", move)

    def give(self, message: bytes) -> None:
        """To rank 0, which takes it."""
        self._pass(message, lambda t: dist.send(t, 0, group=self._group))

    def take_all(self) -> list[bytes]:
        """What each other rank gives, in rank order."""

        def take(rank: int) -> Callable[[Tensor], object]:
            return lambda t: dist.recv(t, rank, group=self._group)

        return [self._pass(b"", take(rank)) for rank in range(1, self.num_ranks)]

    def _pass(self, message: bytes, move: Callable[[Tensor], object]) -> bytes:
        """`move` carries two tensors: how many bytes there are, and those."""
        size = torch.tensor([len(message)])
        move(size)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if message:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if len(data):
            move(data)
        return data.numpy().tobytes()


def _own_place(num_ranks: int) -> tuple[int, int]:
    """(rank, rank on this host)."""
    if missing := [name for name in VARIABLES if not os.environ.get(name, "").strip()]:
        raise ConfigError(
            f"executor='external' needs {', '.join(missing)} in the environment; start every rank "
            f"with a launcher, as in: torchrun --nproc-per-node {num_ranks} --no-python rackmount"
        )
    started = int(os.environ["WORLD_SIZE"])
    if started != num_ranks:
        raise ConfigError(
            f"the launcher started {started} ranks, and the engine is asked for {num_ranks}; "
            f"choose tp={started}, or start {num_ranks}"
        )
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


def _end(wire: _Wire, close: Callable[[], None]) -> None:
    if wire.rank == 0:
        wire.spread(b"")
    close()
    wire.drop()
    leave()
