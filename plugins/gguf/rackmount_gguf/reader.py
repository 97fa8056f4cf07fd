"""GGUF files as checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from rackmount_gguf.container import STORED_TYPES, Container, StoredTensor, open_container
from rackmount_gguf.metadata import ROPE_FACTORS, config_of, generation_config_of
from rackmount_gguf.names import hugging_face_name, num_paired_heads, rope_order
from rackmount_registry.checkpoint import TensorInfo
from rackmount_registry.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN = {
    GGMLQuantizationType.F32: (np.float32, torch.float32),
    GGMLQuantizationType.F16: (np.float16, torch.float16),
    GGMLQuantizationType.BF16: (np.int16, torch.bfloat16),
}
"""Types that are read as stored: NumPy's view of the bytes, then PyTorch's."""


def open_checkpoint(path: Path) -> "GgufCheckpoint":
    """Opens the GGUF file `path`.

    Raises:
        CheckpointError: a file that is damaged, or holds an architecture, a tensor or a type that
            is not read.
    """
    return GgufCheckpoint(open_container(path))


class GgufCheckpoint:
    """One GGUF file under Hugging Face names; a `rackmount_registry.checkpoint.Checkpoint`.

    float32, float16 and bfloat16 tensors come as stored, all others dequantized to float32.
    """

    def __init__(self, container: Container) -> None:
        self.config: Mapping[str, Any] = config_of(container)
        self.generation_config: Mapping[str, Any] = generation_config_of(container)
        self._path, self._metadata = container.path, container.metadata
        self._container: Container | None = container
        self._stored = _renamed(container, self.config)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                shape=stored.shape, dtype=STORED_TYPES[stored.type], file=str(container.path)
            )
            for name, stored in self._stored.items()
        }

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor or its part `index`, in memory of its own; rows outside are not decoded."""
        if self._container is None:
            raise ValueError(f"{self._path} is closed")
        stored = self._stored[name]
        rows, *columns = index or (slice(None),)
        heads = num_paired_heads(name, self.config)
        first = rows if heads is None else rope_order(stored.shape[0], heads)[rows]
        return _decode(self._container.raw(stored), stored, (first, *columns))

    def tokenizer(self, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase | None":
        """The tokenizer with its chat template; None where the file holds no vocabulary. The
        format brings no code, so there is none to trust."""
        from rackmount_gguf.tokenizer import build_tokenizer  # transformers takes seconds to import

        return build_tokenizer(self._metadata, self._path)

    def close(self) -> None:
        """Gives the mapping back; `read` raises ValueError from now on."""
        self._container = None


def _renamed(container: Container, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The file's tensors by their Hugging Face names."""
    renamed = {}
    for given, stored in container.tensors.items():
        if given == ROPE_FACTORS:
            continue
        name = hugging_face_name(given)
        if name is None:
            raise CheckpointError(
                f"{container.path}: tensor {given!r} has no place "
                f"in architecture {config['model_type']!r}"
            )
        heads = num_paired_heads(name, config)
        if heads is not None and stored.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{container.path}: the {stored.shape[0]} rows of tensor {given!r} "
                f"are not {heads} heads of even size"
            )
        renamed[name] = stored
    return renamed


def _decode(raw: np.ndarray, stored: StoredTensor, index: tuple[slice | np.ndarray, ...]) -> Tensor:
    """The part `index` of a tensor from the bytes of all of it."""
    if stored.type in _PLAIN:
        view, dtype = _PLAIN[stored.type]
        part = raw.view(view).reshape(stored.shape)[index]
        return torch.from_numpy(np.array(part)).view(dtype)
    whole = len(stored.shape) - 1  # dimensions above the blocks
    rows = raw.reshape(*stored.shape[:-1], -1)[index[:whole]]
    if rows.size:
        dense = dequantize(np.ascontiguousarray(rows), stored.type)
    else:  # the share of a rank that gets none: more than gguf can do
        dense = np.empty((*rows.shape[:-1], stored.shape[-1]), np.float32)
    return torch.from_numpy(dense[(..., *index[whole:])]).contiguous()
