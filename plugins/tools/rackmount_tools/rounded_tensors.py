"""The tensors of a checkpoint, with weights rounded and scales put beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rackmount import Rack
from rackmount_registry.attention import FP8, FP8_MAX
from rackmount_registry.checkpoint import Checkpoint
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import QuantizationScheme, StoredFormat
from rackmount_registry.mount import Draft
from rackmount_registry.nn.storage import LinearPart, Source
from rackmount_tools.compressed_config import key_map_names
from rackmount_tools.observed import Observed

LIMITS = {FP8: FP8_MAX, torch.int8: 127.0}
"""Largest magnitudes of inputs, which are rounded to the type of the weights."""


def formats_of(draft: Draft, scheme: QuantizationScheme) -> dict[str, StoredFormat]:
    """How the logical weights that are rounded are stored, by their names.

    Raises:
        ConfigError: a shape that the format cannot store, or nothing rounds to the format.
    """
    formats = {}
    for socket in draft.sockets:
        for part in [part for weight in socket.weights() for part in weight.logical]:
            if (stored := scheme.format_for(part.name, part.shape, part.role)) is None:
                continue
            if stored.encode is None:
                raise ConfigError(f"{part.name}: nothing rounds weights to {stored.name}")
            formats[part.name] = stored
    return formats


@dataclass(frozen=True, kw_only=True)
class RoundedTensors:
    """What is to be written, of a model whose weights are plain, or stay as they are."""

    rack: Rack
    checkpoint: Checkpoint
    formats: Mapping[str, StoredFormat]
    """Of `formats_of`; the other weights stay as they are."""
    per_head: bool | None
    """Whether KV heads have a scale each, or layers; None: no scales are written."""
    static: bool
    """Whether inputs have a scale."""
    seen: Observed

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._copied()
        for part, source in self._rounded:
            yield from self._round(part, source, self.formats[part.name])
        if self.per_head is not None:
            yield from self._kv_scales(self.per_head)
            yield from self._key_maps()

    @cached_property
    def _rounded(self) -> list[tuple[LinearPart, Source]]:
        """Each logical weight that is rounded, and where it is read."""
        if not self.formats:  # the model's own may take several tensors for a weight
            return []
        found, there = [], self.checkpoint.tensors
        for socket in self.rack.draft.sockets:
            for weight in socket.weights():
                (storage,) = weight.storages.values()
                for part, piece in zip(weight.logical, storage.pieces, strict=True):
                    if part.name in self.formats:
                        source = next(each for each in piece.sources if each.name in there)
                        found.append((part, source))
        return found

    @cached_property
    def _kept(self) -> list[str]:
        gone = {source.name for _, source in self._rounded}
        if self.per_head is not None:
            gone.update(*(layer.answered for layer in self.rack.draft.attention))
        return [name for name in self.checkpoint.tensors if name not in gone]

    def _copied(self) -> Iterator[tuple[str, Tensor]]:
        """As they are stored; what a reader decodes comes in the model's dtype."""
        for name in self._kept:
            tensor = self.checkpoint.read(name)
            plain = hasattr(torch, self.checkpoint.tensors[name].dtype)
            yield name, tensor if plain else tensor.to(self.rack.dtype)

    def _round(
        self, part: LinearPart, source: Source, stored: StoredFormat
    ) -> Iterator[tuple[str, Tensor]]:
        assert stored.encode is not None, "formats_of has seen to it"
        dense = self.checkpoint.read(source.name, source.index).reshape(part.shape)
        encoded = dict(stored.encode(dense.to(self.rack.device, self.rack.dtype)))
        if self.static:
            largest = self.seen.inputs[part.name].view(1)
            scale = largest / LIMITS[encoded["weight"].dtype]
            encoded["input_scale"] = scale.where(largest > 0, 1.0)
        for suffix, tensor in encoded.items():
            rows_alone = suffix == "weight_scale" and tensor.shape == part.shape[:1] != (1,)
            yield f"{part.name}.{suffix}", tensor.unsqueeze(1) if rows_alone else tensor

    def _key_maps(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self.rack.draft.attention:
            if (maps := self.seen.maps.get(layer.index)) is not None:
                for name, matrix in zip(key_map_names(layer.index), (maps.q, maps.k), strict=True):
                    yield layer.sibling(name), matrix.float().contiguous()

    def _kv_scales(self, per_head: bool) -> Iterator[tuple[str, Tensor]]:
        """Scales of a layer [1], or of its KV heads [heads, 1, 1]."""
        for layer in self.rack.draft.attention:
            for name, table in (("k_scale", self.seen.keys), ("v_scale", self.seen.values)):
                scales = table[layer.index].scales()
                yield layer.sibling(name), scales.view(-1, 1, 1) if per_head else scales
