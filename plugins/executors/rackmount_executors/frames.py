"""What the process of a rank and its driver say to each other beside the ring."""

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec

REQUEST = struct.Struct("<Q?")
"""Before a request in the ring: its number, and whether all ranks answer or rank 0 alone."""


class Orders(msgspec.Struct):
    """The first that a rank hears."""

    rank: int
    num_ranks: int
    device: str
    port: int
    """Of the store where ranks meet, on the loopback; 0 for a single rank."""
    start_timeout_s: float
    spin_s: float
    driver_pid: int
    program: str
    codec: str
    payload: bytes


class Trouble(msgspec.Struct):
    """An exception in a rank."""

    time: float
    """Of the clock that all processes share: the first is the cause of the others."""
    summary: str
    traceback: str


class Kind(IntEnum):
    ARRIVED = 0
    """The process runs."""
    JOINED = 1
    """It has met all others."""
    ANSWER = 2
    ERROR = 3
    """The body is a `Trouble`; nothing follows."""
    GONE = 4
    """Not sent: the line has ended."""


class Frame(NamedTuple):
    """A message from a rank to the driver."""

    rank: int
    kind: Kind
    number: int = 0
    """Of the request that an answer is for; 0: the program stands."""
    body: bytes = b""

    def pack(self) -> bytes:
        return _HEADER.pack(self.kind, self.number) + self.body

    @classmethod
    def unpack(cls, rank: int, data: bytes) -> "Frame":
        kind, number = _HEADER.unpack_from(data)
        return cls(rank, Kind(kind), number, data[_HEADER.size :])


_HEADER = struct.Struct("<BQ")
