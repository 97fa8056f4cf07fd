"""Ranks for tests: an executor whose ranks are threads, programs without a model, and what is left
behind."""

import json
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tests.helpers.mounting import plugins
from tests.helpers.ranks import ThreadGroup
from torch.distributed import TCPStore

from rackmount_executors.multiprocess import MultiprocessExecutor
from rackmount_executors.options import MultiprocessOptions
from rackmount_registry import hookimpl
from rackmount_registry.descriptors import Executor
from rackmount_registry.executor import Launch, Pending, Program, Seat
from rackmount_registry.offers import import_attribute
from rackmount_registry.plugins import PluginManager


class ThreadsExecutor:
    """Ranks that are threads, written against the registry alone; messages cross as bytes."""

    def __init__(self, launch: Launch) -> None:
        self.codec = import_attribute(launch.codec, "codec")()
        self.group = ThreadGroup(launch.num_ranks)
        self.answers: deque[list[Any]] = deque()
        factory = import_attribute(launch.program, "program")
        self.programs: list[Program] = [
            factory(
                Seat(rank=rank, num_ranks=launch.num_ranks, device=launch.device, group=member),
                self.codec.decode(self.codec.encode(launch.payload)),
                launch.live,
            )
            for rank, member in enumerate(self.group.members)
        ]

    @property
    def calls(self) -> list[dict[str, int]]:
        """Each rank's collectives since the start, by name."""
        return [dict(member.calls) for member in self.group.members]

    def forget_calls(self) -> None:
        for member in self.group.members:
            member.calls = Counter()

    def call(self, request: Any) -> list[Any]:
        return [program.answer(self._cross(request)) for program in self.programs]

    def submit(self, request: Any) -> None:
        requests = [self._cross(request) for _ in self.programs]
        self.answers.append(self.group.run(lambda rank: self.programs[rank].answer(requests[rank])))

    def collect(self) -> Any:
        return self._cross(self.collect_all()[0])

    def collect_all(self) -> list[Any]:
        """Every rank's answer to the oldest request."""
        answers = self.answers.popleft()
        return [each.result() if isinstance(each, Pending) else each for each in answers]

    def forget(self) -> None:
        self.answers.clear()

    def _cross(self, message: Any) -> Any:
        return self.codec.decode(self.codec.encode(message))

    def close(self) -> None:
        for program in self.programs:
            program.close()


def threads() -> PluginManager:
    """Everything that is installed, and the executor "threads"."""
    plugin = ModuleType("threads_plugin")
    plugin.executors = hookimpl(  # type: ignore[attr-defined]
        lambda: [Executor(name="threads", factory="tests.helpers.executors:ThreadsExecutor")]
    )
    return plugins() + PluginManager.from_modules({"threads": plugin})


class JsonCodec:
    def encode(self, message: Any) -> bytes:
        return json.dumps(message).encode()

    def decode(self, data: bytes) -> Any:
        return json.loads(data)


class Later:
    """A `Pending` of what `work` gives once so many seconds are over."""

    def __init__(self, seconds: float, work: Callable[[], Any]) -> None:
        self._due, self._work = time.monotonic() + seconds, work

    def ready(self) -> bool:
        return time.monotonic() >= self._due

    def result(self) -> Any:
        time.sleep(max(0.0, self._due - time.monotonic()))
        return self._work()


class Toy:
    """A program that does what it is told: [rank or None for all, verb, argument]."""

    def __init__(self, seat: Seat, payload: Any, live: Any) -> None:
        assert live is None
        self.seat, self.payload = seat, payload
        if payload == ["raise", seat.rank]:
            raise ValueError("not in this rank")

    def answer(self, request: Any) -> Any:
        rank, verb, argument = request
        if rank in (None, self.seat.rank):
            return getattr(self, verb)(argument)
        return None

    def close(self) -> None:
        if isinstance(self.payload, str):
            (Path(self.payload) / f"closed {self.seat.rank}").touch()

    def echo(self, argument: Any) -> Any:
        return [self.seat.rank, self.seat.num_ranks, self.seat.device, argument]

    def fail(self, argument: Any) -> None:
        raise ZeroDivisionError(argument)

    def fail_all(self, argument: Any) -> None:
        """The rank `argument` fails, and the others by losing it."""
        if self.seat.rank == argument:
            raise ZeroDivisionError("the cause")
        self.sum([1.0])

    def sleep(self, argument: Any) -> str:
        time.sleep(argument)
        return "slept"

    def later(self, argument: Any) -> Later:
        """[seconds, verb, argument]: does so after a while."""
        seconds, verb, rest = argument
        return Later(seconds, lambda: getattr(self, verb)(rest))

    def now(self, argument: Any) -> float:
        return time.monotonic()

    def cpu_time(self, argument: Any) -> float:
        return time.process_time()

    def text(self, argument: Any) -> str:
        return "x" * argument

    def sum(self, argument: Any) -> Any:
        return self.seat.group.all_reduce(torch.tensor(argument)).tolist()

    def gather(self, argument: Any) -> Any:
        mine = torch.tensor(argument, dtype=torch.float32) + self.seat.rank
        return self.seat.group.all_gather(mine).tolist()

    def bits(self, argument: Any) -> Any:
        """The sum of other random numbers on each rank, exactly."""
        dtype = getattr(torch, argument)
        x = torch.randn(1001, generator=torch.Generator().manual_seed(self.seat.rank)).to(dtype)
        return self.seat.group.all_reduce(x).double().tolist()

    def kill(self, argument: Any) -> None:
        os.kill(os.getpid(), getattr(signal, argument))
        self.sum([1.0])

    def exit(self, argument: Any) -> None:
        os._exit(argument)

    def files(self, argument: Any) -> list[str]:
        """What this process holds open."""
        return open_files()


def toys(num_ranks: int = 2, payload: Any = None, **options: Any) -> MultiprocessExecutor:
    """Processes of `Toy`."""
    launch = Launch(
        program="tests.helpers.executors:Toy",
        codec="tests.helpers.executors:JsonCodec",
        payload=payload,
        num_ranks=num_ranks,
        device="cpu",
    )
    return MultiprocessExecutor(launch, options=MultiprocessOptions(**options))


def ask(executor: Any, request: Any) -> Any:
    """The answer to one request."""
    executor.submit(request)
    return executor.collect()


def pids(executor: Any) -> list[int]:
    return [member.process.pid for member in executor._crew.members]


def await_end(pid: int, seconds: float = 5) -> bool:
    """Whether the process has ended, at the latest when the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def children() -> set[int]:
    """Processes that this one has started, whatever their state."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def open_files() -> list[str]:
    """What this process holds open."""
    entries = Path("/proc/self/fd").iterdir()
    return sorted(str(entry.readlink()) for entry in entries if entry.is_symlink())


@cache
def first_store() -> None:
    """The library under torch's store opens a pipe at its first use, and keeps it for the next."""
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def belongings() -> dict[str, Any]:
    """What must be as before once ranks are gone: child processes, open files (pipes, sockets,
    memory) and shared memory."""
    first_store()
    return {
        "children": children(),
        "files": Counter(open_files()),
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
    }
