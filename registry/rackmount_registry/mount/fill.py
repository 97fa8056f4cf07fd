"""Weights: streamed from the checkpoint into their storages and accounted for to the last
tensor."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from rackmount_registry.checkpoint import Checkpoint, Report, TensorInfo, silent
from rackmount_registry.errors import CheckpointError, listed
from rackmount_registry.mount.assemble import Mounted
from rackmount_registry.mount.draft import Draft
from rackmount_registry.mount.key_maps import read_key_maps
from rackmount_registry.mount.kv_scales import read_kv_scales
from rackmount_registry.nn.embedding import OutputHead
from rackmount_registry.nn.storage import Piece, Source, Storage

NO_SCALES = ("float8_e4m3fn", "float8_e5m2")
"""Other than float8_e8m0fnu, a power of two."""
COMPARED_AT_ONCE = 2**22
"""Values of a tied head and of the embedding that are held against each other together."""


def fill(mounted: Mounted, checkpoint: Checkpoint, report: Report = silent) -> int:
    """Loads every weight of this rank and returns the bytes read.

    Every checkpoint tensor ends as loaded (here, or as a whole on other ranks), as ignored by a
    named rule of the architecture, or as an error; every storage is written once. Nothing is loaded
    before all of that is known to hold. Then it goes socket by socket, so that what is converted,
    by the format or by a kernel, is held twice for one socket alone.

    Raises:
        CheckpointError: missing, extra or misshapen tensors, or integers or eight-bit floats where
            the model has plain floats, by name and file; values that a format refuses, by layer and
            file.
    """
    draft = mounted.draft
    _untie_where_stored(draft.sockets, checkpoint)
    read_kv_scales(draft, checkpoint, mounted.device)
    read_key_maps(draft, checkpoint, mounted.device)
    sources = _account(draft, list(draft.storages()), checkpoint)
    total = sum(it.num_bytes(draft.dtype) for it in draft.storages() if not it.is_absent)
    done = read = 0
    for socket in draft.in_filling_order():
        for storage in socket.storages():
            if storage.is_absent:
                continue
            storage.allocate(mounted.device, draft.dtype)
            found = [sources[piece.name] for piece in storage.pieces]
            for piece, source in zip(storage.pieces, found, strict=True):
                read += _read(checkpoint, source, storage.tensor[piece.where])
            storage.files = tuple({checkpoint.tensors[source.name].file for source in found})
            done += storage.num_bytes(draft.dtype)
            report("load", done, total)
        socket.finish()
    require_filled(draft.model)
    return read


def require_filled(model: nn.Module) -> None:
    """
    Raises:
        CheckpointError: a tensor of the model that is not in a socket.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    left = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if left:
        raise CheckpointError(f"the model holds tensors that nothing fills: {listed(left)}")


def _untie_where_stored(sockets: Iterable[nn.Module], checkpoint: Checkpoint) -> None:
    """A tied head that the checkpoint stores with other values is a head of its own, whatever the
    config says."""
    for head in sockets:
        if isinstance(head, OutputHead) and head.tied:
            names = head.weight_name, head.tied[0].table.names[0] + ".weight"
            if checkpoint.tensors.keys() >= set(names) and not _equal(checkpoint, *names):
                head.untie()


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two matrices hold the same values; some rows of each are in memory at a time."""
    shape = checkpoint.tensors[one].shape
    if shape != checkpoint.tensors[other].shape or len(shape) != 2:
        return False
    num_rows = max(1, COMPARED_AT_ONCE // shape[1])
    parts = (slice(start, start + num_rows) for start in range(0, shape[0], num_rows))
    columns = slice(0, shape[1])
    return all(
        torch.equal(checkpoint.read(one, (rows, columns)), checkpoint.read(other, (rows, columns)))
        for rows in parts
    )


def _account(draft: Draft, storages: list[Storage], checkpoint: Checkpoint) -> dict[str, Source]:
    """Every tensor of the checkpoint against every piece of the model: where each piece is, by its
    name. Marks optional storages that are not there as absent."""
    model, sockets = draft.model, draft.sockets
    found: dict[str, Source] = {}
    missing: list[str] = []
    names = Counter(piece.name for storage in storages for piece in storage.pieces)
    if twice := [name for name, count in names.items() if count > 1]:
        raise CheckpointError(f"{type(model).__name__} stores {listed(twice)} in two sockets")
    for storage in storages:
        there = {piece.name: _find(piece, checkpoint) for piece in storage.pieces}
        storage.is_absent = storage.optional and not any(there.values())
        if storage.is_absent:
            continue
        found |= {name: source for name, source in there.items() if source is not None}
        missing += [name for name, source in there.items() if source is None]
        for source in filter(None, there.values()):
            _check(source, checkpoint.tensors[source.name], storage.dtype)
    answered = {name for socket in sockets for name in socket.answers_for()}
    read = {source.name for source in found.values()}
    extra = sorted(checkpoint.tensors.keys() - read - answered)
    if missing:
        files = sorted({info.file for info in checkpoint.tensors.values()})
        packed = {name.rpartition(".")[0] + ".weight" for name in extra}
        told = "leaves them plain" if draft.scheme else "is not in config.json"
        raise CheckpointError(
            f"{len(missing)} tensors that the model needs are not in the checkpoint "
            f"({listed(files)}): {listed(sorted(missing))}"
            + f"; others are there instead, and a quantization_config {told}"
            * (not packed.isdisjoint(missing))
        )
    rules: Mapping[str, str] = getattr(model, "ignored", {})
    unknown = [
        f"{name} in {checkpoint.tensors[name].file}"
        for name in extra
        if not any(re.fullmatch(rule, name) for rule in rules)
    ]
    if unknown:
        tied = tuple(f"{s.path}." for s in sockets if isinstance(s, OutputHead) and s.tied)
        raise CheckpointError(
            f"{len(unknown)} tensors of the checkpoint are neither used by {type(model).__name__} "
            f"nor ignored by one of its rules: {listed(unknown)}"
            + "; a head of such tensors needs tie_word_embeddings=false"
            * any(each.startswith(tied) for each in unknown)
        )
    return found


def _find(piece: Piece, checkpoint: Checkpoint) -> Source | None:
    """The one of its places that the checkpoint has."""
    there = [source for source in piece.sources if source.name in checkpoint.tensors]
    if len(there) > 1:
        both = " and as ".join(f"{s.name} in {checkpoint.tensors[s.name].file}" for s in there)
        raise CheckpointError(f"the checkpoint stores {piece.name} as {both}; one must go")
    return there[0] if there else None


def _check(source: Source, info: TensorInfo, dtype: str | None) -> None:
    """One tensor against its place: equal shape up to dimensions of size one, no change between
    integers and floats, and no floats that need a scale."""
    where = f"{source.name} in {info.file}"
    is_rigid = _is_integral(info.dtype) or _is_integral(dtype) or (dtype or "").startswith("float8")
    if _squeezed(info.shape) != _squeezed(source.shape):
        raise CheckpointError(
            f"{where} has shape {list(info.shape)}, the model needs {list(source.shape)}"
        )
    if info.dtype != dtype and is_rigid:
        needed = dtype or "a floating point type"
        raise CheckpointError(f"{where} is {info.dtype}, the model needs {needed}")
    if dtype == "float32" and info.dtype in NO_SCALES:
        raise CheckpointError(
            f"{where} is {info.dtype}, which scales have only beside others; "
            f"the model needs {dtype}"
        )
    if dtype is None and info.dtype.startswith("float8"):
        raise CheckpointError(
            f"{where} is {info.dtype}: values without their scale, which no scheme of its "
            "configuration explains"
        )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_integral(dtype: str | None) -> bool:
    """Whether `dtype` names an integer type of torch; a reader's own formats decode to floats."""
    known = getattr(torch, dtype or "", None)
    return isinstance(known, torch.dtype) and not known.is_floating_point


def _read(checkpoint: Checkpoint, source: Source, target: Tensor) -> int:
    """Copies one piece and returns the bytes read."""
    shape = checkpoint.tensors[source.name].shape
    index: tuple[slice, ...] | None = source.index
    if not shape:
        index = None
    elif shape != source.shape:
        sizes = zip(source.shape, source.index, strict=True)
        cuts = iter([cut for size, cut in sizes if size != 1])
        index = tuple(slice(0, 1) if size == 1 else next(cuts) for size in shape)
    data = checkpoint.read(source.name, index)
    target.copy_(data.reshape(target.shape))
    return data.nbytes
