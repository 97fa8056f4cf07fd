"""The processes of the ranks, as the driver holds them."""

import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not listed

from rackmount_executors.frames import Frame, Kind, Orders
from rackmount_executors.ring import RING_BYTES, RingClosed, RingWriter

CODE = "import sys; sys.path[:] = {path}; from rackmount_executors.child import main; main{fds}"
"""What a rank runs. No main module is imported again, so the driver's needs no guard."""

END_PATIENCE_S = 5.0
"""For ranks to end by themselves when they are let go."""


@dataclass(frozen=True, kw_only=True)
class Member:
    process: subprocess.Popen[bytes]
    line: Connection
    written: int
    freed: int


class Crew:
    """Starts, hears and ends the processes. What they share has no name in any file system, and no
    port that is fixed or open to other hosts."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.members: list[Member] = []
        self._driver = os.getpid()
        self._memory_fd = _anonymous_file(8 * num_ranks + RING_BYTES)
        self._memory = mmap(self._memory_fd, 0)
        self._signs = memoryview(self._memory)[: 8 * num_ranks].cast("d")
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        """By file descriptor of the line."""
        self._store: Any = None
        self._ended = False

    def start(self, orders: Callable[[int, int], Orders]) -> None:
        """Starts all ranks at once; `orders` is given a rank and the store's port."""
        port = 0
        if self.num_ranks > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
                self._store = TCPStore(
                    "127.0.0.1",
                    port,
                    None,
                    True,
                    wait_for_workers=False,
                    master_listen_fd=server.detach(),
                )
        environment = _environment(self.num_ranks)
        for rank in range(self.num_ranks):
            self._start_one(rank, environment)
        for rank, member in enumerate(self.members):
            with suppress(OSError):  # it has died, and is heard of as every rank that dies
                member.line.send_bytes(msgspec.msgpack.encode(orders(rank, port)))
        members = self.members
        self._ring = RingWriter(
            self._memory,
            8 * self.num_ranks,
            [each.written for each in members],
            [each.freed for each in members],
        )

    def _start_one(self, rank: int, environment: dict[str, str]) -> None:
        line, its_line = multiprocessing.Pipe()
        (its_written, written), (freed, its_freed) = os.pipe(), os.pipe()
        fds = (its_line.fileno(), self._memory_fd, its_written, its_freed)
        process = subprocess.Popen(
            command(fds),
            stdin=subprocess.DEVNULL,
            stdout=2,  # the driver's output is the driver's
            pass_fds=fds,
            env=environment,
            start_new_session=True,  # what is typed at a terminal goes to the driver alone
        )
        its_line.close()
        os.close(its_written)
        os.close(its_freed)
        self.members.append(Member(process=process, line=line, written=written, freed=freed))
        self._ranks[line.fileno()] = rank
        self._poll.register(line, select.POLLIN)

    def send(self, message: bytes, while_waiting: Callable[[], None]) -> None:
        """Writes a message to the ring; see `RingWriter.write`. Ends the ranks where that is
        interrupted."""
        try:
            self._ring.write(message, while_waiting)
        except RingClosed:
            raise
        except BaseException:  # some ranks may have it, others not
            self.end(0)
            raise

    def receive(self, timeout_s: float) -> list[Frame]:
        """What ranks have said, at most one frame of each; empty when the time is over. Ends
        the ranks where that is interrupted."""
        ready = self._poll.poll(timeout_s * 1e3)
        try:
            return [self._receive_one(fd) for fd, _ in ready]
        except BaseException:  # half a frame may be lost
            self.end(0)
            raise

    def _receive_one(self, fd: int) -> Frame:
        rank = self._ranks[fd]
        try:
            return Frame.unpack(rank, self.members[rank].line.recv_bytes())
        except (EOFError, OSError):
            self._poll.unregister(fd)
            return Frame(rank, Kind.GONE)

    def silence(self, rank: int) -> float:
        """Seconds since the rank's last sign of life; 0 before the first."""
        sign = self._signs[rank]
        return time.monotonic() - sign if sign else 0.0

    def fate(self, rank: int) -> str:
        """How a rank that is gone has ended."""
        process = self.members[rank].process
        try:
            code = process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "has closed its line to the driver"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def end(self, patience_s: float = END_PATIENCE_S) -> None:
        """Lets the ranks go and kills those that are left after `patience_s`. May be called
        twice."""
        if self._ended or os.getpid() != self._driver:  # a fork does not own them
            return
        self._ended = True
        for member in self.members:
            if not patience_s:
                member.process.kill()
            member.line.close()
            os.close(member.written)
            os.close(member.freed)
        deadline = time.monotonic() + patience_s
        for member in self.members:
            try:
                member.process.wait(max(deadline - time.monotonic(), 0) if patience_s else None)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        self._signs.release()
        self._memory.close()
        os.close(self._memory_fd)
        self._store = None

    @property
    def ended(self) -> bool:
        return self._ended


def command(fds: tuple[int, ...]) -> list[str]:
    """A fresh interpreter that finds modules where this one does."""
    return [sys.executable, "-c", CODE.format(path=sys.path, fds=fds)]


def _environment(num_ranks: int) -> dict[str, str]:
    """The driver's, with what it leaves open: ranks of one host need no other network than the
    loopback, and share the cores."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    defaults: dict[str, Any] = {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, num_cores // num_ranks)),
    }
    return defaults | os.environ


def _anonymous_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rackmount")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd
