"""A checkpoint as a folder of safetensors files, written shard by shard."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rackmount_registry.errors import ConfigError

SHARD_BYTES = 4 * 2**30
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "LICENSE*", "NOTICE*")
NOT_COPIED = ("config.json", "*.index.json", "*quant*_config.json")
"""What belongs to the weights."""
MARK = ".incomplete"
"""A file in a folder that is being written."""


@dataclass(kw_only=True)
class Written:
    """Tensors that went to files."""

    num_bytes: int = 0
    num_tensors: Counter[torch.dtype] = field(default_factory=Counter)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """`folder`, made if it is missing, and nobody else's: until it is complete it holds `MARK`. It
    is gone again where an error leaves nothing else in it.

    Raises:
        ConfigError: there is something in it, or it cannot be made.
    """
    made, mark = not folder.exists(), folder / MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        full = any(folder.iterdir()) or not _made(mark)
    except OSError as error:
        raise ConfigError(f"out={str(folder)!r} must be a folder: {error}") from error
    if full:
        held = f", and holds {MARK}: a run is at work there, or was cut off" * mark.exists()
        raise ConfigError(f"out={str(folder)!r} must be an empty folder, or none yet{held}")
    try:
        yield folder
    finally:
        mark.unlink()
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _made(file: Path) -> bool:
    """Whether it was not there before."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], most: int = SHARD_BYTES
) -> Written:
    """Streams tensors into "model.safetensors", or into shards of about `most` bytes and an
    index."""
    shards: list[list[str]] = []
    written = Written()
    for held in _shards(tensors, most):
        file = folder / _unnumbered(len(shards))
        file.touch()
        mode = file.stat().st_mode
        save_file(held, file, metadata={"format": "pt"})
        file.chmod(mode)  # else only its owner could read it
        shards.append(list(held))
        written.num_bytes += sum(tensor.nbytes for tensor in held.values())
        written.num_tensors.update(tensor.dtype for tensor in held.values())
    if len(shards) == 1:
        (folder / _unnumbered(0)).rename(folder / "model.safetensors")
        return written
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (folder / _unnumbered(index)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": written.num_bytes}, "weight_map": weight_map},
    )
    return written


def _unnumbered(index: int) -> str:
    """Of a shard, while it is open how many there will be."""
    return f"model-{index + 1:05}.safetensors"


def _shards(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > most:
            yield held
            held, size = {}, 0
        held[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    yield held


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path) -> None:
    """Copies the tokenizer's files, and whatever else lies beside the weights of `source`."""
    for file in sorted(source.iterdir()):
        wanted = any(fnmatch(file.name, pattern) for pattern in COPIED)
        if wanted and not any(fnmatch(file.name, pattern) for pattern in NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
