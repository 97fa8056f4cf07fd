"""The matrices that map queries and keys before an FP8 cache: read, and held to change no score."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rackmount_registry.attention import FP8, KeyMaps, KVCache
from rackmount_registry.checkpoint import Checkpoint
from rackmount_registry.errors import CheckpointError
from rackmount_registry.mount.draft import Draft
from rackmount_registry.nn.attention import Attention

TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Of a product that must be the identity, in each of its numbers, by how its factors are stored."""


def read_key_maps(draft: Draft, checkpoint: Checkpoint, device: torch.device) -> None:
    """Gives every attention layer the maps that the checkpoint's scheme names, if its cache is FP8,
    and makes it answer for them.

    Raises:
        CheckpointError: a map that is missing, of another shape or type, not finite; or a pair that
            would change scores.
    """
    for layer, names in _named(draft.kv_cache, draft.attention):
        for name in names:
            if name not in checkpoint.tensors:
                raise CheckpointError(
                    f"quantization_config names {name}, which is not in the checkpoint: each layer "
                    "has matrices of its own"
                )
        layer.answered += names
        if draft.kv_cache.dtype == FP8:
            q, k = (_read(layer, checkpoint, name) for name in names)
            off = (q @ k.T - torch.eye(len(q), dtype=q.dtype)).abs().amax().item()
            most = max(TOLERANCES[checkpoint.tensors[name].dtype] for name in names)
            if not off <= most:
                raise CheckpointError(
                    f"{names[0]} times the transpose of {names[1]} must be the identity to {most}, "
                    f"or scores would change, and is off by {off:.3g}"
                )
            layer.key_maps = _held(q, k, draft, device)


def give_key_maps(draft: Draft, device: torch.device) -> None:
    """Maps that map to the same, for layers of an FP8 cache that are to have some."""
    for layer, _ in _named(draft.kv_cache, draft.attention):
        same = torch.eye(layer.params.head_size)
        layer.key_maps = _held(same, same, draft, device)


def _named(
    cache: KVCache, layers: Iterable[Attention]
) -> Iterable[tuple[Attention, tuple[str, str]]]:
    """Layers with maps, and what these are called."""
    if cache.key_map_names is None:
        return
    for layer in layers:
        names = cache.key_map_names(layer.path.rpartition(".")[0])
        if names is not None:
            q, k = map(layer.sibling, names)
            yield layer, (q, k)


def _held(q: Tensor, k: Tensor, draft: Draft, device: torch.device) -> KeyMaps:
    return KeyMaps(q=q.to(device, draft.dtype), k=k.to(device, draft.dtype))


def _read(layer: Attention, checkpoint: Checkpoint, name: str) -> Tensor:
    """float64 [D, D]."""
    info, size = checkpoint.tensors[name], layer.params.head_size
    if info.shape != (size, size) or info.dtype not in TOLERANCES:
        raise CheckpointError(
            f"{name} in {info.file} is {info.dtype} {list(info.shape)} and must be one of "
            f"{', '.join(TOLERANCES)}, [{size}, {size}]"
        )
    return checkpoint.read(name).double()
