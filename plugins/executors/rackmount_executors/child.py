"""The process of a rank."""

import os
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from datetime import timedelta
from mmap import mmap
from multiprocessing.connection import Connection

import msgspec

from rackmount_executors.frames import REQUEST, Frame, Kind, Orders, Trouble
from rackmount_executors.ring import RingClosed, RingReader
from rackmount_registry.answers import Answers
from rackmount_registry.executor import Codec, Program
from rackmount_registry.offers import import_attribute

BEAT_S = 0.5
"""Between two signs of life."""


def main(line_fd: int, memory_fd: int, written_fd: int, freed_fd: int) -> None:
    """Serves a program until the driver closes the ring or is gone."""
    line: Connection = Connection(line_fd)
    orders = msgspec.msgpack.decode(line.recv_bytes(), type=Orders)
    memory = mmap(memory_fd, 0)
    threading.Thread(target=_beat, args=(memory, orders), daemon=True).start()
    try:
        ring = RingReader(memory, 8 * orders.num_ranks, written_fd, freed_fd, orders.spin_s)
        with suppress(RingClosed, BrokenPipeError):
            _serve(orders, line, ring)
    except BaseException as error:
        trouble = Trouble(
            time.monotonic(), f"{type(error).__name__}: {error}", traceback.format_exc()
        )
        body = msgspec.msgpack.encode(trouble)
        with suppress(OSError):  # the driver may be gone by now
            line.send_bytes(Frame(orders.rank, Kind.ERROR, body=body).pack())
        os._exit(1)  # in order, it would wait for ranks that wait for it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is closed; in order, gloo's threads may outlive the interpreter, and abort


def _serve(orders: Orders, line: Connection, ring: RingReader) -> None:
    # After the first sign of life: it takes seconds.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not listed

    from rackmount_executors.torch_group import leave, take_seat

    def tell(kind: Kind, number: int = 0, body: bytes = b"") -> None:
        line.send_bytes(Frame(orders.rank, kind, number, body).pack())

    tell(Kind.ARRIVED)
    patience = timedelta(seconds=orders.start_timeout_s)
    seat = take_seat(
        orders.rank,
        orders.num_ranks,
        device=orders.device,
        local_rank=orders.rank,
        store=TCPStore("127.0.0.1", orders.port, None, False, patience) if orders.port else None,
    )
    tell(Kind.JOINED)
    codec: Codec = import_attribute(orders.codec, "the codec of the ranks")()
    factory = import_attribute(orders.program, "the program of the ranks")
    program: Program = factory(seat, codec.decode(orders.payload), None)
    tell(Kind.ANSWER)
    answers = Answers()
    asked: deque[tuple[int, bool]] = deque()
    """Of each answer, the number of its request and whether all ranks give it."""
    try:
        while True:
            while answers and not ring.wait(answers.ready):
                answer = answers.take()
                number, all_answer = asked.popleft()
                if all_answer or orders.rank == 0:
                    tell(Kind.ANSWER, number, codec.encode(answer))
            message = ring.read()
            asked.append(REQUEST.unpack_from(message))
            answers.put(program.answer(codec.decode(message[REQUEST.size :])))
    finally:
        program.close()
        leave()


def _beat(memory: mmap, orders: Orders) -> None:
    """Writes the time where the driver looks for it, for as long as there is one.

    The kernel's own signal for a parent's death is of no use: it comes when the thread that started
    this process ends.
    """
    signs = memoryview(memory).cast("B")[: 8 * orders.num_ranks].cast("d")
    while os.getppid() == orders.driver_pid:
        signs[orders.rank] = time.monotonic()
        time.sleep(BEAT_S)
    os._exit(1)
