"""What every socket is: a leaf of the traced model that the mount names, surveys, binds and
fills."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from rackmount_registry.axes import Axis, Group, Mesh
from rackmount_registry.experts import DispatchContext, ExpertKernel, TokenDispatcher
from rackmount_registry.formats import LinearKernel, Role, StoredFormat
from rackmount_registry.nn.rotary import Rotary
from rackmount_registry.nn.storage import Storage, StoredWeight
from rackmount_registry.ops import Ops
from rackmount_registry.step import Step


class FormatOf(Protocol):
    """How the checkpoint stores the logical weight `name` of shape [out, in]."""

    def __call__(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat: ...


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What sockets are cut by, before any memory is taken."""

    mesh: Mesh
    format_of: FormatOf


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What sockets are bound to: the chosen parts, and the step they run in."""

    ops: Ops
    step: Step
    linear: Callable[[str], LinearKernel]
    """Kernel for a weight format."""
    epilogues: Callable[[str], tuple[str, ...]]
    """What that kernel can do to its product, of `formats.EPILOGUES`."""
    prologues: Callable[[str], tuple[str, ...]]
    """After which operations it can round its input, of `formats.PROLOGUES`."""
    experts: Callable[[str, DispatchContext], tuple[ExpertKernel, TokenDispatcher]]
    """Kernel and dispatcher for the weight format of an experts' bundle."""
    max_positions: int
    dtype: torch.dtype
    """Of activations."""
    device: torch.device
    _tables: dict[Rotary, Tensor] = field(default_factory=dict, init=False)

    def rope_table(self, rope: Rotary) -> Tensor:
        """The table of `rope` on the device; layers of equal rope share it."""
        if rope not in self._tables:
            self._tables[rope] = rope.table(self.max_positions).to(self.device)
        return self._tables[rope]


class Socket(nn.Module):
    """Base of all sockets.

    Life: constructed with sizes alone; named by `path`; `survey` lays out what this rank stores;
    `bind` takes the chosen parts; the mount fills `storages()`; `finish` makes the weights ready.
    Only then may it run.
    """

    uses: ClassVar[frozenset[str]] = frozenset()
    """Operations (see `ops.OPS`) that it calls: no others are bound."""
    by_row: ClassVar[bool] = False
    """Each row of the output follows from the same row of the inputs alone, whichever and however
    many the others are. Behind the last socket of which that is not true, the mount leaves out the
    tokens whose hidden states nobody wants."""
    cut: bool = False
    """It gets the rows of the tokens that the step wants alone, and so must whatever of the step's
    it reads by row (see `step.wanted_rows`); set by the mount."""
    path: str = ""
    """Place in the model, e.g. "model.layers.0.self_attn.qkv"."""
    pending: tuple[Group, ...] = ()
    """Ranks over which the output is still a share of a sum. Reduced in `forward`, unless
    `deferred`."""
    deferred: bool = False
    """The sum is left to a fused operation behind this socket."""

    def sibling(self, name: str) -> str:
        """Checkpoint name next to this socket: sockets inside a composite store under their
        parent's path."""
        parent = self.path.rpartition(".")[0]
        return f"{parent}.{name}" if parent else name

    def survey(self, survey: Survey) -> None:
        """Lays out storages for this rank; takes no memory."""

    def bind(self, binding: Binding) -> None:
        """Takes the chosen parts."""

    def weights(self) -> Iterator[StoredWeight]:
        """Linear weights, for the choice of kernels."""
        return iter(())

    def storages(self) -> Iterator[Storage]:
        """Everything that the checkpoint fills."""
        for weight in self.weights():
            yield from weight.storages.values()

    def answers_for(self) -> Iterator[str]:
        """Checkpoint tensors that are rightly not loaded here: other ranks' experts, a tied head's
        copy."""
        return iter(())

    def finish(self) -> None:
        """Called once after loading."""

    def reduced(self, y: Tensor) -> Tensor:
        """`y` summed over the pending ranks, unless that is deferred."""
        return y if self.deferred else reduce_over(self.pending, y)


def told(method: Callable[..., Any], **facts: Any) -> dict[str, Any]:
    """Those of `facts` that a part's method names: the contract has more than it once had."""
    named = inspect.signature(method).parameters
    return {name: fact for name, fact in facts.items() if name in named}


def reduce_over(groups: tuple[Group, ...], y: Tensor) -> Tensor:
    """The sum of `y` over groups of ranks."""
    for group in groups:
        y = group.all_reduce(y)
    return y


def splitting(mesh: Mesh, *extents: int | Axis) -> tuple[Group, ...]:
    """The groups that really split one of `extents`: sums over these extents are incomplete on one
    rank."""
    groups = {id(group): group for group in map(mesh.group, extents) if group.size > 1}
    return tuple(groups.values())


M = TypeVar("M", bound=nn.Module)


class Layers(nn.ModuleList, Generic[M]):
    """`count` blocks, made by `make(index)`."""

    def __init__(self, count: int, make: Callable[[int], M]) -> None:
        super().__init__(make(index) for index in range(count))

    def __iter__(self) -> Iterator[M]:
        return cast(Iterator[M], super().__iter__())
