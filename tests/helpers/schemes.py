"""Quantization schemes and their formats, without a checkpoint or a mount."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import Slot, StoredFormat, Weight

T = TypeVar("T")


def read_scheme(scheme: Callable[[ConfigReader], T], values: Mapping[str, Any]) -> T:
    """A scheme from its `quantization_config`."""
    return scheme(ConfigReader(values, "config.json: quantization_config", frozenset()))


def load(
    stored: StoredFormat, tensors: Sequence[Mapping[str, Tensor]], parts: Sequence[int], size: int
) -> Weight:
    """What `finish` makes of the tensors of fused parts, side by side as the mount lays them."""
    there = _present(stored, tensors)
    loaded = {slot.suffix: _side_by_side(slot, tensors, parts, size) for slot in there}
    return stored.finish(loaded, tuple(parts), size)


def load_bundle(
    stored: StoredFormat,
    experts: Sequence[Sequence[Mapping[str, Tensor]]],
    parts: Sequence[int],
    size: int,
) -> Weight:
    """The same of several experts, each with its parts."""
    there = _present(stored, [tensors for expert in experts for tensors in expert])
    loaded = {
        slot.suffix: torch.stack([_side_by_side(slot, expert, parts, size) for expert in experts])
        for slot in there
    }
    return stored.finish(loaded, tuple(parts), size)


def dense_of(values: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """(values - zeros) * scales in float32, of values [out, in] and what each group has."""
    groups = torch.arange(values.shape[1]) // (values.shape[1] if group == -1 else group)
    return (values.float() - zeros.float()[:, groups]) * scales.float()[:, groups]


def _present(stored: StoredFormat, tensors: Sequence[Mapping[str, Tensor]]) -> list[Slot]:
    there = [slot for slot in stored.slots if all(slot.suffix in each for each in tensors)]
    for slot in stored.slots:
        assert slot in there or slot.optional, f"{slot.suffix} is missing"
    assert {slot.suffix for slot in there} == tensors[0].keys(), "tensors that have no slot"
    return there


def _side_by_side(
    slot: Slot, tensors: Sequence[Mapping[str, Tensor]], parts: Sequence[int], size: int
) -> Tensor:
    axis = next(at for at, dim in enumerate(slot.dims) if dim.axis in ("out", "part"))
    shaped = [
        each[slot.suffix].reshape(_shape(slot, part, size))
        for each, part in zip(tensors, parts, strict=True)
    ]
    joined = torch.cat(shaped, axis)
    return joined if slot.dtype is None else joined.to(getattr(torch, slot.dtype))


def _shape(slot: Slot, out: int, size: int) -> list[int]:
    whole = {"out": out, "in": size, "part": 1}
    return [dim.per if dim.axis == "fixed" else -(-whole[dim.axis] // dim.per) for dim in slot.dims]
