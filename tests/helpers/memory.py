"""Checkpoints that live in memory, for models that a test makes up."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rackmount_registry.axes import Mesh
from rackmount_registry.checkpoint import TensorInfo
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import QuantizationScheme
from rackmount_registry.mount import Draft, draft

FILE = "memory.safetensors"


class MemoryCheckpoint:
    """A `rackmount_registry.checkpoint.Checkpoint` over a dict of tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.config: Mapping[str, Any] = {}
        self.generation_config: Mapping[str, Any] = {}
        self.stored = tensors
        self.tensors = {
            name: TensorInfo(
                shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), file=FILE
            )
            for name, tensor in tensors.items()
        }
        self.reads: Counter[str] = Counter()
        """How often each tensor was read."""

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        self.reads[name] += 1
        tensor = self.stored[name]
        return tensor if index is None else tensor[index]

    def tokenizer(self, *, trust_remote_code: bool = False) -> None:
        return None

    def close(self) -> None:
        pass


def draft_module(
    make: Callable[[], nn.Module],
    *,
    dtype: torch.dtype = torch.float64,
    mesh: Mesh | None = None,
    scheme: QuantizationScheme | None = None,
) -> Draft:
    """The draft of a model that reads no configuration."""
    return draft(lambda _: make(), ConfigReader({}), dtype=dtype, mesh=mesh, scheme=scheme)


def random_tensors(drafted: Draft) -> dict[str, Tensor]:
    """Normal values for every checkpoint tensor that a draft asks for, whole; the same each
    time."""
    random = torch.Generator().manual_seed(0)
    return {
        piece.name: torch.randn(piece.shape, generator=random, dtype=drafted.dtype)
        for storage in drafted.storages()
        for piece in storage.pieces
    }
