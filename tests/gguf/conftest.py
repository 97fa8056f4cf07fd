"""Small GGUF files, written with the `gguf` package as llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

GgufFile = Callable[..., Path]


SIZES = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata value in the type that converters give it."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


@pytest.fixture
def gguf_file(tmp_path: Path) -> GgufFile:
    """`gguf_file(tensors, metadata, architecture="llama")` writes a file.

    `tensors` maps names to arrays, or to (bytes uint8 [rows, bytes], type). Sizes and an embedding
    are there without being asked for; None drops one.
    """

    def write(
        tensors: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        sizes = {f"{architecture}.{key}": value for key, value in SIZES.items()}
        for key, value in {**sizes, **(metadata or {})}.items():
            if value is not None:
                add(writer, key, value)
        embedding = {"token_embd.weight": np.zeros((8, 64), np.float32)}
        for name, tensor in {**embedding, **(tensors or {})}.items():
            if isinstance(tensor, tuple):
                writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
            elif tensor is not None:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
