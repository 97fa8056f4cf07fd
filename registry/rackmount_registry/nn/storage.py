"""Storage: a tensor of this rank, and the pieces of checkpoint tensors that fill it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch

from rackmount_registry.axes import Axis, Cut, Mesh, size_of
from rackmount_registry.errors import CheckpointError, ConfigError, listed
from rackmount_registry.formats import DENSE, Dim, Role, Slot, StoredFormat, Weight

Index = tuple[slice, ...]
MAX_NAMED = 4
"""Logical weights that an error names."""


@dataclass(frozen=True)
class Source:
    """A place in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """Of the whole checkpoint tensor, up to dimensions of size one."""
    index: Index
    """What this rank reads of it."""


@dataclass(frozen=True)
class Piece(Source):
    """One checkpoint tensor's share in a storage."""

    where: Index
    """Where that goes in the storage; a leading expert index is a slice of one."""
    others: tuple[Source, ...] = ()
    """Other spellings: places that hold the same values in checkpoints without `name`."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """All places, of which a checkpoint has one."""
        return self, *self.others


class Storage:
    """Memory to be: its shape and pieces are known from the survey on, the tensor from `allocate`
    on.

    Args:
        optional: a checkpoint may lack it, all pieces together.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str | None,
        pieces: Sequence[Piece],
        *,
        optional: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.pieces = tuple(pieces)
        self.optional = optional
        self.is_absent = False
        """It is optional, and the checkpoint has none."""
        self.files: tuple[str, ...] = ()
        """Where its pieces were read from."""
        self.release()

    def release(self) -> None:
        """Gives its memory back, or keeps it from being taken."""
        self.tensor = torch.empty(0, device="meta")

    def num_bytes(self, model_dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes."""
        return prod(self.shape) * self._dtype(model_dtype).itemsize

    def allocate(self, device: torch.device, model_dtype: torch.dtype) -> None:
        self.tensor = torch.empty(self.shape, device=device, dtype=self._dtype(model_dtype))

    def _dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None:
            return model_dtype
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def vector(name: str, extent: int | Axis, mesh: Mesh) -> Storage:
    """A stored vector in the model's dtype, cut with its axis."""
    cut = mesh.cut(extent)
    piece = Piece(name, (size_of(extent),), (slice(cut.start, cut.stop),), (slice(0, cut.size),))
    return Storage((cut.size,), None, [piece])


@dataclass(frozen=True)
class LinearPart:
    """One logical weight [out, in], as the checkpoint names it."""

    name: str
    """Without ".weight"."""
    out_extent: int | Axis
    in_extent: int | Axis
    role: Role = "linear"

    @property
    def shape(self) -> tuple[int, int]:
        return size_of(self.out_extent), size_of(self.in_extent)


class StoredWeight:
    """Logical weights of one stored format side by side in one matrix, or a bundle of them, one for
    each expert.

    Args:
        bundle: for each local expert its parts; a plain weight is a bundle of one without the
            leading dimension.
        own: slots that the socket lays out itself, and the format gets nothing of.
    """

    def __init__(
        self,
        bundle: Sequence[Sequence[LinearPart]],
        stored: StoredFormat,
        mesh: Mesh,
        *,
        stacked: bool,
        own: Collection[str] = (),
    ) -> None:
        self.stored = stored
        first = bundle[0]
        self.logical = [part for parts in bundle for part in parts]
        """As many as each storage has pieces, and in their order."""
        self.names = [part.name for part in self.logical]
        self.num_matrices = len(bundle)
        self.role = first[0].role
        self.parts = tuple(mesh.cut(part.out_extent).size for part in first)
        self.in_features = mesh.cut(first[0].in_extent).size
        self.finished_bytes = 0
        """Of what kernels are given; 0 before `finish`."""
        self.storages: dict[str, Storage] = {}
        for slot in (slot for slot in stored.slots if slot.suffix not in own):
            self.storages[slot.suffix] = lay_out(bundle, slot, mesh, stacked=stacked)

    def num_bytes(self, model_dtype: torch.dtype) -> int:
        """Bytes of what kernels are given; before `finish`, by what the format says."""
        if self.finished_bytes:
            return self.finished_bytes
        if self.stored.held_bytes is not None:
            return self.num_matrices * self.stored.held_bytes(sum(self.parts), self.in_features)
        return sum(storage.num_bytes(model_dtype) for storage in self.storages.values())

    def finish(self) -> Weight:
        """The loaded tensors as a weight of the named format. What a quantized one was made from is
        given back.

        Raises:
            CheckpointError: values that the format does not allow.
        """
        there = {suffix: each for suffix, each in self.storages.items() if not each.is_absent}
        tensors = {suffix: storage.tensor for suffix, storage in there.items()}
        try:
            weight = self.stored.finish(tensors, self.parts, self.in_features)
        except CheckpointError as error:
            files = sorted({file for storage in there.values() for file in storage.files})
            names = listed(self.names, MAX_NAMED)
            raise CheckpointError(f"{names} ({', '.join(files)}): {error}") from error
        self.finished_bytes = sum(tensor.nbytes for tensor in weight.tensors.values())
        if self.stored is not DENSE:
            for storage in there.values():
                storage.release()
        return weight


def fusable(stored: StoredFormat) -> bool:
    """Whether parts of this format can lie side by side: every tensor grows with the rows or has
    one entry a part."""
    return all(any(dim.axis in ("out", "part") for dim in slot.dims) for slot in stored.slots)


def lay_out(
    bundle: Sequence[Sequence[LinearPart]], slot: Slot, mesh: Mesh, *, stacked: bool
) -> Storage:
    """A slot's storage, with a piece for each part of `bundle`; see `StoredWeight`."""
    pieces: list[Piece] = []
    for expert, parts in enumerate(bundle):
        offsets = [0] * len(slot.dims)
        for part in parts:
            cuts = [_cut(part, dim, mesh) for dim in slot.dims]
            where = tuple(
                slice(offset, offset + cut.size)
                for offset, (_, cut) in zip(offsets, cuts, strict=True)
            )
            pieces.append(
                Piece(
                    f"{part.name}.{slot.suffix}",
                    tuple(whole for whole, _ in cuts),
                    tuple(slice(cut.start, cut.stop) for _, cut in cuts),
                    (slice(expert, expert + 1), *where) if stacked else where,
                )
            )
            for axis, dim in enumerate(slot.dims):
                if dim.axis in ("out", "part"):
                    offsets[axis] += cuts[axis][1].size
    by_axis = zip(*(piece.where for piece in pieces), strict=True)
    shape = tuple(max(share.stop for share in shares) for shares in by_axis)
    return Storage(shape, slot.dtype, pieces, optional=slot.optional)


def _cut(part: LinearPart, dim: Dim, mesh: Mesh) -> tuple[int, Cut]:
    """(entries of the whole dimension, this rank's share of them)."""
    if dim.axis in ("part", "fixed"):
        count = 1 if dim.axis == "part" else dim.per
        return count, Cut(0, count)
    extent = part.out_extent if dim.axis == "out" else part.in_extent
    cut = mesh.cut(extent)
    whole = -(-size_of(extent) // dim.per)
    if cut.start % dim.per or (cut.stop % dim.per and cut.stop != size_of(extent)):
        raise ConfigError(
            f"{part.name}: {mesh.group(extent).size} ranks cut its {dim.axis} dimension of "
            f"{size_of(extent)} at {cut.start}:{cut.stop}, which is not a multiple of {dim.per} as "
            "its format needs"
        )
    return whole, Cut(cut.start // dim.per, -(-cut.stop // dim.per))
