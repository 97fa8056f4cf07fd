"""Weights: streamed from the checkpoint into their storages and accounted for to the last
tensor; or drawn at random, where speed alone is of interest."""

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor, nn

from rackmount_registry.checkpoint import Checkpoint, Report, TensorInfo, silent
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.mount.assemble import Mounted
from rackmount_registry.mount.draft import Draft
from rackmount_registry.nn.embedding import OutputHead
from rackmount_registry.nn.storage import Piece, Storage

MAX_LISTED = 8
COMPARED_AT_ONCE = 2**22
"""Values of a tied head and of the embedding that are held against each other together."""
RANDOM_STD = 0.02
"""Standard deviation of random weights."""


def fill(mounted: Mounted, checkpoint: Checkpoint, report: Report = silent) -> int:
    """Loads every weight of this rank and returns the bytes read.

    Every checkpoint tensor ends as loaded (here, or as a whole on other ranks), as ignored by a
    named rule of the architecture, or as an error; every storage is written once. Nothing is loaded
    before all of that is known to hold.

    Raises:
        CheckpointError: missing, extra or misshapen tensors, or integers or eight-bit floats where
            the model has plain floats; by name and file.
    """
    draft = mounted.draft
    _untie_where_stored(draft.sockets, checkpoint)
    storages = list(draft.storages())
    _account(draft, storages, checkpoint)
    total = sum(storage.num_bytes(draft.dtype) for storage in storages)
    done = read = 0
    for storage in storages:
        storage.allocate(mounted.device, draft.dtype)
        for piece in storage.pieces:
            read += _read(checkpoint, piece, storage)
        done += storage.num_bytes(draft.dtype)
        report("load", done, total)
    _finish(draft)
    return read


def fill_randomly(mounted: Mounted, seed: int) -> None:
    """Gives every weight of this rank random numbers N(0, 0.02), and norms the scale 1.

    A tensor's numbers follow from `seed`, its name and its shape, so every run draws the same on
    one kind of device, and ranks hold shares of one model. A tied head stays tied. Nothing is read.

    Raises:
        ConfigError: quantized weights; random bits are no weights.
        CheckpointError: a tensor of the model that is not in a socket.
    """
    draft = mounted.draft
    storages = list(draft.storages())
    if quantized := [s.pieces[0].name for s in storages if not _is_drawable(s.dtype)]:
        raise ConfigError(
            "random weights are plain floats alone, and these are quantized: "
            f"{_listed(quantized)}; leave the quantization out of config.json"
        )
    random = torch.Generator(mounted.device)
    for storage in storages:
        storage.allocate(mounted.device, draft.dtype)
        for piece in storage.pieces:
            _draw(piece, storage.tensor[piece.where], random, seed)
    _finish(draft)


def _is_drawable(dtype: str | None) -> bool:
    """Whether `dtype` is the model's own, or a float of 16 bits or more."""
    return dtype is None or (getattr(torch, dtype).is_floating_point and "float8" not in dtype)


def _draw(piece: Piece, target: Tensor, random: torch.Generator, seed: int) -> None:
    """Fills `target`, this rank's share of `piece`. Vectors that are called weights scale norms."""
    if len(piece.shape) == 1 and piece.name.endswith(".weight"):
        target.fill_(1)
        return
    digest = blake2b(f"{seed} {piece.name}".encode(), digest_size=8).digest()
    random.manual_seed(int.from_bytes(digest) >> 1)
    if target.dim() > len(piece.shape):
        target = target[0]  # one of the experts
    if target.shape == piece.shape and target.is_contiguous():
        target.normal_(0, RANDOM_STD, generator=random)
    else:
        whole = torch.empty(piece.shape, dtype=target.dtype, device=target.device)
        target.copy_(whole.normal_(0, RANDOM_STD, generator=random)[piece.index])


def _finish(draft: Draft) -> None:
    """Makes filled weights ready to run."""
    for socket in draft.sockets:
        socket.finish()
    left = [name for name, tensor in _own_tensors(draft.model) if tensor.device.type == "meta"]
    if left:
        raise CheckpointError(f"the model holds tensors that nothing fills: {_listed(left)}")


def _untie_where_stored(sockets: Iterable[nn.Module], checkpoint: Checkpoint) -> None:
    """A tied head that the checkpoint stores with other values is a head of its own, whatever the
    config says."""
    for head in sockets:
        if (
            not isinstance(head, OutputHead)
            or not head.tied
            or head.weight_name not in checkpoint.tensors
        ):
            continue
        embedding = head.tied[0].table.names[0] + ".weight"
        if embedding not in checkpoint.tensors:
            continue
        if not _equal(checkpoint, head.weight_name, embedding):
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


def _account(draft: Draft, storages: list[Storage], checkpoint: Checkpoint) -> None:
    """Every tensor of the checkpoint against every piece of the model."""
    model, sockets = draft.model, draft.sockets
    wanted: dict[str, tuple[Piece, Storage]] = {}
    for storage in storages:
        for piece in storage.pieces:
            if piece.name in wanted:
                raise CheckpointError(f"{type(model).__name__} stores {piece.name} in two sockets")
            wanted[piece.name] = piece, storage
    missing = sorted(wanted.keys() - checkpoint.tensors.keys())
    if missing:
        files = sorted({info.file for info in checkpoint.tensors.values()})
        raise CheckpointError(
            f"{len(missing)} tensors that the model needs are not in the checkpoint "
            f"({_listed(files)}): {_listed(missing)}"
        )
    answered = {name for socket in sockets for name in socket.answers_for()}
    extra = sorted(checkpoint.tensors.keys() - wanted.keys() - answered)
    rules: Mapping[str, str] = getattr(model, "ignored", {})
    unknown = [
        f"{name} in {checkpoint.tensors[name].file}"
        for name in extra
        if not any(re.fullmatch(rule, name) for rule in rules)
    ]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors of the checkpoint are neither used by {type(model).__name__} "
            f"nor ignored by one of its rules: {_listed(unknown)}"
        )
    for name, (piece, storage) in wanted.items():
        _check(name, checkpoint.tensors[name], piece, storage.dtype)


def _check(name: str, info: TensorInfo, piece: Piece, dtype: str | None) -> None:
    """One tensor against its place: equal shape, no change between integers and floats, and no
    floats that need a scale."""
    if info.shape != piece.shape and not (info.shape == () and piece.shape == (1,)):
        raise CheckpointError(
            f"{name} in {info.file} has shape {list(info.shape)}, "
            f"the model needs {list(piece.shape)}"
        )
    if info.dtype != dtype and (_is_integral(info.dtype) or _is_integral(dtype)):
        raise CheckpointError(
            f"{name} in {info.file} is {info.dtype}, "
            f"the model needs {dtype or 'a floating point type'}"
        )
    if dtype is None and info.dtype.startswith("float8"):
        raise CheckpointError(
            f"{name} in {info.file} is {info.dtype}: values without their scale, which no scheme "
            "of its configuration explains"
        )


def _is_integral(dtype: str | None) -> bool:
    """Whether `dtype` names an integer type of torch; a reader's own formats decode to floats."""
    known = getattr(torch, dtype or "", None)
    return isinstance(known, torch.dtype) and not known.is_floating_point


def _read(checkpoint: Checkpoint, piece: Piece, storage: Storage) -> int:
    """Copies one piece and returns the bytes read."""
    target = storage.tensor[piece.where]
    scalar = not checkpoint.tensors[piece.name].shape
    data = checkpoint.read(piece.name, None if scalar else piece.index)
    target.copy_(data.reshape(target.shape))
    return data.nbytes


def _own_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
