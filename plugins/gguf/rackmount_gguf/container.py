"""The GGUF container: metadata, and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
`gguf.GGUFReader` reads it too, but builds several arrays for each string: 3 s for a vocabulary of
49,152 tokens, where this takes 0.2 s.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from rackmount_registry.errors import CheckpointError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
"""Value type -> code of `struct`."""

STORED_TYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.Q4_0: "Q4_0",
    GGMLQuantizationType.Q4_1: "Q4_1",
    GGMLQuantizationType.Q8_0: "Q8_0",
    GGMLQuantizationType.Q4_K: "Q4_K",
    GGMLQuantizationType.Q6_K: "Q6_K",
}
"""The tensor types that are read, and their names in `TensorInfo.dtype`."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor in the file."""

    shape: tuple[int, ...]
    """Rows first, as PyTorch has it; the file lists the sizes the other way round."""
    type: GGMLQuantizationType
    start: int
    """First byte in the file."""
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Container:
    """An opened file. `data` is its memory map, all bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    data: np.ndarray

    def raw(self, tensor: StoredTensor) -> np.ndarray:
        """The bytes of a tensor, uint8 [nbytes], not copied."""
        return self.data[tensor.start : tensor.start + tensor.nbytes]


class _Cursor:
    """Takes values from the front of a buffer; EOFError where it is too short."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise EOFError
        return self._data[start : self.position]

    def numbers(self, code: str, count: int) -> list[Any]:
        raw = self.take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", raw))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def values(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count)
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        return [self.array() for _ in range(count)]

    def array(self) -> list[Any]:
        kind = GGUFValueType(self.number("I"))
        return self.values(kind, self.number("Q"))

    def value(self) -> Any:
        return self.values(GGUFValueType(self.number("I")), 1)[0]


def open_container(path: Path) -> Container:
    """Maps the file and reads its header; checks that every tensor lies inside the file.

    Raises:
        CheckpointError: not a GGUF file, truncated, split in parts, a name twice, or a tensor of a
            type that is not read; with the file and the tensor.
    """
    try:
        data = np.memmap(path, mode="r")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} is empty") from error
    cursor = _Cursor(data.data)
    try:
        num_tensors, num_values = _read_preamble(cursor, path)
        metadata = _read_metadata(cursor, num_values, path)
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
    except EOFError as error:
        raise CheckpointError(
            f"{path} is truncated: its {len(data)} bytes end inside the header"
        ) from error
    except ValueError as error:  # a string that is not UTF-8, a value type that does not exist
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts; "
            "join them with llama-gguf-split --merge"
        )
    alignment = metadata.get("general.alignment") or 32
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, code, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path} holds tensor {name!r} twice")
        tensors[name] = _stored(path, name, shape, code, start + offset)
        end = tensors[name].start + tensors[name].nbytes
        if end > len(data):
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends at byte {end}, the file at {len(data)}"
            )
    return Container(path=path, metadata=metadata, tensors=tensors, data=data)


def _read_preamble(cursor: _Cursor, path: Path) -> tuple[int, int]:
    magic = bytes(cursor.take(4))
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise CheckpointError(f"{path} has GGUF version {version}; 2 and 3 are read, little-endian")
    return cursor.number("Q"), cursor.number("Q")


def _read_metadata(cursor: _Cursor, count: int, path: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path} holds metadata key {key!r} twice")
        metadata[key] = cursor.value()
    return metadata


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name = cursor.string()
    sizes = cursor.numbers("Q", cursor.number("I"))
    return name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _stored(path: Path, name: str, shape: tuple[int, ...], code: int, start: int) -> StoredTensor:
    if code not in STORED_TYPES:
        known = {int(kind): kind.name for kind in GGMLQuantizationType}
        raise CheckpointError(
            f"{path}: tensor {name!r} has type {known.get(code, code)}; "
            f"those that are read: {', '.join(kind.name for kind in STORED_TYPES)}"
        )
    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: rows of tensor {name!r}, shape {shape}, "
            f"are not whole {kind.name} blocks of {block}"
        )
    nbytes = math.prod(shape) // block * block_bytes
    return StoredTensor(shape=shape, type=kind, start=start, nbytes=nbytes)
