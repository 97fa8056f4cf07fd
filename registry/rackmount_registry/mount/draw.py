"""Weights drawn at random, where speed alone is of interest."""

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

from rackmount_registry.attention import FP8
from rackmount_registry.errors import ConfigError, listed
from rackmount_registry.formats import Weight
from rackmount_registry.mount.assemble import Mounted
from rackmount_registry.mount.fill import require_filled
from rackmount_registry.mount.key_maps import give_key_maps
from rackmount_registry.mount.kv_scales import give_kv_scales
from rackmount_registry.nn.socket import Socket
from rackmount_registry.nn.storage import Piece, Storage, StoredWeight

RANDOM_STD = 0.02
"""Standard deviation of random weights."""


def fill_randomly(mounted: Mounted, seed: int) -> None:
    """Gives every weight of this rank random numbers N(0, 0.02), and norms the scale 1.

    A tensor's numbers follow from `seed`, its name and its shape, so every run draws the same on
    one kind of device, and ranks hold shares of one model. A tied head stays tied. A quantized
    weight is one drawn so and rounded as its format's `encode` does. Nothing is read.

    Raises:
        ConfigError: tensors that are no plain floats, of a format that cannot be encoded.
        CheckpointError: a tensor of the model that is not in a socket.
    """
    draft = mounted.draft
    _require_drawable(storage for socket in draft.sockets for storage in _split(socket)[1])
    if draft.kv_cache.dtype == FP8:
        assert draft.kv_cache.scale is not None, "random weights bring no scales"
        give_kv_scales(draft.attention, draft.kv_cache.scale, mounted.device)
        give_key_maps(draft, mounted.device)
    random = torch.Generator(mounted.device)
    for socket in draft.in_filling_order():
        encoded, plain = _split(socket)
        for weight in encoded:
            _encode_random(weight, draft.dtype, random, seed)
        for storage in plain:
            _draw_storage(storage, draft.dtype, random, seed)
        socket.finish()
    require_filled(draft.model)


def random_weight(
    weight: StoredWeight, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Weight:
    """One weight with the numbers that `fill_randomly` gives it, for who needs no model around it.

    Raises:
        ConfigError: as for `fill_randomly`.
    """
    random = torch.Generator(device)
    if weight.stored.encode is not None:
        _encode_random(weight, dtype, random, seed)
    else:
        _require_drawable(weight.storages.values())
        for storage in weight.storages.values():
            _draw_storage(storage, dtype, random, seed)
    return weight.finish()


def _split(socket: Socket) -> tuple[list[StoredWeight], list[Storage]]:
    """The weights that are encoded, and the storages of all else."""
    encoded = [weight for weight in socket.weights() if weight.stored.encode is not None]
    inside = {id(storage) for weight in encoded for storage in weight.storages.values()}
    return encoded, [storage for storage in socket.storages() if id(storage) not in inside]


def _require_drawable(storages: Iterable[Storage]) -> None:
    """Random bits are weights only as the model's own floats, or floats of 16 bits or more."""
    quantized = [
        storage.pieces[0].name
        for storage in storages
        if storage.dtype is not None
        and (
            not getattr(torch, storage.dtype).is_floating_point
            or storage.dtype.startswith("float8")
        )
    ]
    if quantized:
        raise ConfigError(
            "random weights are plain floats, or of formats that can be encoded, and these are "
            f"quantized: {listed(quantized)}; leave the quantization out of config.json"
        )


def _encode_random(
    weight: StoredWeight, dtype: torch.dtype, random: torch.Generator, seed: int
) -> None:
    """Fills the storages of one quantized weight."""
    encode = weight.stored.encode
    assert encode is not None
    for index, part in enumerate(weight.logical):
        _seed(random, seed, f"{part.name}.weight")
        dense = torch.empty(part.shape, dtype=dtype, device=random.device)
        tensors = encode(dense.normal_(0, RANDOM_STD, generator=random))
        for suffix, storage in weight.storages.items():
            storage.is_absent = suffix not in tensors
            if storage.is_absent:
                assert storage.optional, f"{weight.stored.name}: encode gives no {suffix}"
                continue
            if not index:
                storage.allocate(random.device, dtype)
            piece = storage.pieces[index]
            whole = tensors[suffix].reshape(piece.shape)
            target = storage.tensor[piece.where]
            target.copy_(whole[piece.index].reshape(target.shape))


def _draw_storage(storage: Storage, dtype: torch.dtype, random: torch.Generator, seed: int) -> None:
    storage.allocate(random.device, dtype)
    for piece in storage.pieces:
        _draw(piece, storage.tensor[piece.where], random, seed)


def _draw(piece: Piece, target: Tensor, random: torch.Generator, seed: int) -> None:
    """Fills `target`, this rank's share of `piece`. Vectors that are called weights scale norms."""
    if len(piece.shape) == 1 and piece.name.endswith(".weight"):
        target.fill_(1)
        return
    _seed(random, seed, piece.name)
    if target.dim() > len(piece.shape):
        target = target[0]  # one of the experts
    if target.shape == piece.shape and target.is_contiguous():
        target.normal_(0, RANDOM_STD, generator=random)
    else:
        whole = torch.empty(piece.shape, dtype=target.dtype, device=target.device)
        target.copy_(whole.normal_(0, RANDOM_STD, generator=random)[piece.index])


def _seed(random: torch.Generator, seed: int, name: str) -> None:
    digest = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    random.manual_seed(int.from_bytes(digest) >> 1)
