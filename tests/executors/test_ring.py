"""The ring, in one process: what is written is what every reader reads."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from mmap import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackmount_executors.ring import (
    NUM_SLOTS,
    RING_BYTES,
    SLOT_BYTES,
    RingClosed,
    RingReader,
    RingWriter,
)

OFFSET = 24
PARTS = st.sampled_from([0, 1, SLOT_BYTES - 17, SLOT_BYTES - 16, SLOT_BYTES - 15, 3 * SLOT_BYTES])


class Rig:
    """A writer and its readers."""

    def __init__(self, num_readers: int) -> None:
        self.memory = mmap(-1, OFFSET + RING_BYTES)
        written, freed = ([os.pipe() for _ in range(num_readers)] for _ in range(2))
        self.pipes = [fd for pair in written + freed for fd in pair]
        self.writer = RingWriter(
            self.memory, OFFSET, [w for _, w in written], [r for r, _ in freed]
        )
        self.readers = [
            RingReader(self.memory, OFFSET, r, w)
            for (r, _), (_, w) in zip(written, freed, strict=True)
        ]
        self.written, self.freed = written, freed

    def close(self, *pipes: int) -> None:
        for pipe in pipes or self.pipes:
            with suppress(OSError):
                os.close(pipe)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(2)
    yield made
    made.close()


def never() -> None:
    raise AssertionError("the ring is full")


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(PARTS, min_size=1, max_size=40), num_readers=st.integers(1, 3))
def test_every_reader_reads_every_message_in_order_whatever_their_sizes(
    sizes: list[int], num_readers: int
) -> None:
    rig = Rig(num_readers)
    messages = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    read: list[list[bytes]] = [[] for _ in rig.readers]

    def follow(index: int) -> None:
        read[index] += [rig.readers[index].read() for _ in messages]

    threads = [threading.Thread(target=follow, args=(i,)) for i in range(num_readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        rig.writer.write(message, lambda: None)
    for thread in threads:
        thread.join()
    rig.close()
    assert read == [messages] * num_readers


def test_a_full_ring_waits_for_the_slowest_reader_and_says_so(rig: Rig) -> None:
    fast, slow = rig.readers
    for index in range(NUM_SLOTS):
        rig.writer.write(b"%d" % index, never)
        assert fast.read() == b"%d" % index
    with pytest.raises(AssertionError, match="full"):
        rig.writer.write(b"more", never)
    assert [slow.read() for _ in range(NUM_SLOTS)] == [b"%d" % i for i in range(NUM_SLOTS)]


def test_a_reader_that_is_gone_is_told_to_the_writer(rig: Rig) -> None:
    rig.close(rig.written[1][0], rig.freed[1][1])
    with pytest.raises(RingClosed):
        rig.writer.write(b"x", never)


def test_a_writer_that_is_gone_is_told_to_the_reader_after_the_last_message(rig: Rig) -> None:
    rig.writer.write(b"last", never)
    rig.close(*(write for _, write in rig.written))
    for reader in rig.readers:
        assert reader.read() == b"last"
        with pytest.raises(RingClosed):
            reader.read()


def test_a_slot_out_of_its_turn_is_never_taken_for_a_message(rig: Rig) -> None:
    rig.writer.write(b"one", never)
    rig.memory[OFFSET] = 7
    with pytest.raises(AssertionError, match="slot 7 of the ring stands for 0"):
        rig.readers[0].read()


def test_a_wait_ends_with_a_message_or_with_something_else(rig: Rig) -> None:
    reader, looks = rig.readers[0], [False, False, True]
    assert not reader.wait(lambda: looks.pop(0))
    assert looks == []
    rig.writer.write(b"x" * 2 * SLOT_BYTES, never)
    assert reader.wait(lambda: False)
    assert reader.read() == b"x" * 2 * SLOT_BYTES
    rig.close(*(write for _, write in rig.written))
    assert reader.wait(lambda: False)  # there is the end to read
    with pytest.raises(RingClosed):
        reader.read()
