"""A model of which only the configuration is there: its weights are drawn at random."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rackmount_registry.checkpoint import TensorInfo


@dataclass
class DummyCheckpoint:
    """A `rackmount_registry.checkpoint.Checkpoint` without tensors, and without a tokenizer: random
    weights say nothing that is worth reading."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        raise KeyError(name)

    def tokenizer(self, *, trust_remote_code: bool = False) -> None:
        return None

    def close(self) -> None:
        """Holds nothing."""
