"""A ring of slots in shared memory: written once, read by every rank.

The memory has no name, so nothing is left of it when the last process that holds it has ended. Two
pipes beside it count for each reader what is written and what is free: the kernel orders a count
after the bytes that it stands for, and the end of either side ends the pipe.
"""

import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from mmap import mmap

NUM_SLOTS = 16
SLOT_BYTES = 1 << 16
RING_BYTES = NUM_SLOTS * SLOT_BYTES

_HEADER = struct.Struct("<QQ")
"""The slot's number since the start, and the bytes of the message from here on."""
NAP_S = 1e-4
"""Between two looks at what has no pipe to wait for."""
_ROOM = SLOT_BYTES - _HEADER.size
_POLL_MS = 250


class RingClosed(EOFError):  # noqa: N818  # an end that is expected, not an error
    """The other side is gone."""


class RingWriter:
    """Writes messages of any length, each in as many slots as it takes.

    Args:
        memory: `RING_BYTES`, from `offset`.
        written, freed: for each reader the pipe to write counts to, and the one to read them from.
    """

    def __init__(
        self, memory: mmap, offset: int, written: Sequence[int], freed: Sequence[int]
    ) -> None:
        self._memory, self._offset = memory, offset
        self._written, self._freed = written, freed
        self._credits = [NUM_SLOTS] * len(written)
        """Slots that a reader has left, as far as it was asked."""
        self._number = 0

    def write(self, message: bytes, while_waiting: Callable[[], None]) -> None:
        """Returns once the message is in the ring. `while_waiting` is called each quarter of a
        second that a reader lets the ring be full, and may raise.

        Raises:
            RingClosed: a reader is gone.
        """
        view = memoryview(message)
        for begin in range(0, max(len(view), 1), _ROOM):
            for reader in range(len(self._credits)):
                self._take_credit(reader, while_waiting)
            start = self._offset + self._number % NUM_SLOTS * SLOT_BYTES
            part = view[begin : begin + _ROOM]
            _HEADER.pack_into(self._memory, start, self._number, len(view) - begin)
            start += _HEADER.size
            self._memory[start : start + len(part)] = part
            self._number += 1
            for pipe in self._written:
                _count(pipe, 1)

    def _take_credit(self, reader: int, while_waiting: Callable[[], None]) -> None:
        pipe = self._freed[reader]
        while not self._credits[reader]:
            if not _is_readable(pipe):
                while_waiting()
            elif not (freed := os.read(pipe, NUM_SLOTS)):
                raise RingClosed
            else:
                self._credits[reader] += len(freed)
        self._credits[reader] -= 1


class RingReader:
    """Reads every message in order.

    Args:
        spin_s: how long a wait looks again and again before it sleeps. The writer pays for waking
            those that sleep, and the message comes later to them.
    """

    def __init__(
        self, memory: mmap, offset: int, written: int, freed: int, spin_s: float = 0.0
    ) -> None:
        self._memory, self._offset = memory, offset
        self._written, self._freed = written, freed
        self._spin_s = spin_s
        self._poll = select.poll()
        self._poll.register(written, select.POLLIN)
        self._number = 0
        self._num_ready = self._num_used = 0

    def read(self) -> bytes:
        """Waits for the next message.

        Raises:
            RingClosed: the writer is gone.
        """
        rest, part = self._read_slot()
        parts = [part]
        while rest > len(part):
            rest, part = self._read_slot()
            parts.append(part)
        return b"".join(parts)

    def wait(self, other: Callable[[], bool]) -> bool:
        """Until `other` is true, or a message has come: gives whether it was the message. Looks at
        both all the time for `spin_s`, then now and then."""
        deadline = time.monotonic() + self._spin_s
        while not other():
            if self._num_ready or self._poll.poll(0):
                return True
            if time.monotonic() < deadline:
                os.sched_yield()
            else:
                select.select((self._written,), (), (), NAP_S)
        return False

    def _read_slot(self) -> tuple[int, bytes]:
        """(bytes of the message from this slot on, those in it)."""
        if not self._num_ready:
            if self._spin_s:
                self._spin()
            self._num_ready = len(os.read(self._written, NUM_SLOTS))
            if not self._num_ready:
                raise RingClosed
        start = self._offset + self._number % NUM_SLOTS * SLOT_BYTES
        number, rest = _HEADER.unpack_from(self._memory, start)
        assert number == self._number, f"slot {number} of the ring stands for {self._number}"
        start += _HEADER.size
        part = self._memory[start : start + min(rest, _ROOM)]
        self._number += 1
        self._num_ready -= 1
        self._num_used += 1
        if self._num_used == NUM_SLOTS // 2:  # seldom, since each is a call of the kernel
            _count(self._freed, self._num_used)
            self._num_used = 0
        return rest, part

    def _spin(self) -> None:
        deadline = time.monotonic() + self._spin_s
        while not self._poll.poll(0) and time.monotonic() < deadline:
            os.sched_yield()


def _count(pipe: int, num_slots: int) -> None:
    try:
        os.write(pipe, bytes(num_slots))
    except BrokenPipeError as error:
        raise RingClosed from error


def _is_readable(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(_POLL_MS))
