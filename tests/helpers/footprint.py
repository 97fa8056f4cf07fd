"""Bytes that tensors take: those that something holds, and the most that a call asks for at
once."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors of dataclasses, mappings, lists and tuples, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def held_bytes(value: object) -> int:
    """Of the memory behind those tensors, whole, each piece of it once."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(value))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class Allocations(TorchDispatchMode):
    """While it is entered, notes the largest memory behind a result that is not behind `held`."""

    def __init__(self, held: Iterable[object]) -> None:
        super().__init__()
        self._held = {each.untyped_storage().data_ptr() for each in tensors_in(list(held))}
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._held:
                    self.largest = max(self.largest, storage.nbytes())
        return out
