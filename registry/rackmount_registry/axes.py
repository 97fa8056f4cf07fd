"""Axes: how sizes split over ranks, without a model knowing of ranks.

A size in a model file is an `int`, which never splits, or an `Axis` from a closed set of names. A
`Mesh` maps the names
to groups of ranks: tensor parallelism, expert parallelism and data-parallel attention are the same
    model file under another mapping.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rackmount_registry.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

AXIS_NAMES = ("heads", "kv_heads", "ffn", "expert_ffn", "experts", "vocab")


@dataclass(frozen=True)
class Axis:
    """`count` units of `width` elements each, split by whole units."""

    name: str
    count: int
    width: int = 1
    replicate: bool = False
    """More ranks than units: each unit lives on several ranks, instead of a refusal."""

    def __post_init__(self) -> None:
        if self.name not in AXIS_NAMES:
            raise ConfigError(f"axis name {self.name!r} is not one of {', '.join(AXIS_NAMES)}")

    @property
    def size(self) -> int:
        """Elements of the whole axis."""
        return self.count * self.width


def size_of(extent: int | Axis) -> int:
    """Elements of an extent, whole."""
    return extent.size if isinstance(extent, Axis) else extent


@dataclass(frozen=True)
class Cut:
    """One rank's share of an extent, in elements."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Group(Protocol):
    """Ranks that work together along one mesh axis. Collectives act on equal shapes on every
    rank."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum over ranks, the same bits on every rank; may reuse `x`."""

    def all_gather(self, x: "Tensor") -> "Tensor":
        """Every rank's `x` joined along the last dimension, in rank order."""


@dataclass(frozen=True)
class Solo:
    """A group of one: collectives are the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: "Tensor") -> "Tensor":
        return x

    def all_gather(self, x: "Tensor") -> "Tensor":
        return x


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Which group of ranks splits which axis; an axis without a group is whole everywhere."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    """By axis name."""

    @classmethod
    def tensor_parallel(cls, group: Group) -> "Mesh":
        """Heads, feed-forward width and vocabulary over one group; experts whole, each cut in its
        width."""
        return cls(groups={name: group for name in AXIS_NAMES if name != "experts"})

    def group(self, extent: int | Axis) -> Group:
        """The ranks that split `extent`."""
        if isinstance(extent, int):
            return Solo()
        return self.groups.get(extent.name, Solo())

    def cut(self, extent: int | Axis) -> Cut:
        """This rank's share of `extent`.

        Units split evenly. The vocabulary alone may split unevenly: every rank but the last ones
        takes ceil(count / ranks), and the head pads. Where ranks outnumber the units of a
        replicated axis, consecutive ranks share one.

        Raises:
            ConfigError: the ranks do not divide the units; the message names the legal rank counts.
        """
        if isinstance(extent, int):
            return Cut(0, extent)
        group = self.group(extent)
        rank, size, count, width = group.rank, group.size, extent.count, extent.width
        if extent.name == "vocab":
            share = -(-count // size)
            return Cut(min(rank * share, count) * width, min((rank + 1) * share, count) * width)
        if extent.replicate and size > count and size % count == 0:
            unit = rank // (size // count)
            return Cut(unit * width, (unit + 1) * width)
        if count % size:
            legal = [n for n in range(1, count + 1) if count % n == 0]
            more = f", or a multiple of {count}" if extent.replicate else ""
            raise ConfigError(
                f"{size} ranks do not divide {extent.name}={count}; "
                f"choose one of {', '.join(map(str, legal))}{more}"
            )
        share = count // size * width
        return Cut(rank * share, (rank + 1) * share)
