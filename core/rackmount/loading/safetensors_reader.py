"""Checkpoints in safetensors files: one file, or shards named by an index."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from rackmount_registry.checkpoint import TensorInfo
from rackmount_registry.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_transformers = Lock()
"""It imports its modules when they are first asked for, which two threads may not do at a time."""
LFS = b"version https://git-lfs"
"""What a file of git-lfs begins with that was not fetched."""
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
MODELOPT_FILE = "hf_quant_config.json"
QUANTIZATION_FILES = {
    MODELOPT_FILE: "modelopt",
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
}
"""Files beside config.json, and the method whose they are."""
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class SafetensorsCheckpoint:
    """A folder as `save_pretrained` writes it. Tensors are mapped, and read slice by slice."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self.folder = folder
        self.config = read_configuration(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._open_files = ExitStack()
        self._handles: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            for file in files:
                self._open(file)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path) -> None:
        try:
            handle = self._open_files.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            why = "it may be truncated"
            if isinstance(error, SafetensorError) and _is_pointer(file):
                why = "it is what git-lfs has in its place; `git lfs pull` fetches it"
            raise CheckpointError(f"{file} cannot be read, {why}: {error}") from error
        self._handles[file.name] = handle
        for name in handle.keys():  # noqa: SIM118  # the handle is no mapping
            if name in self.tensors:
                raise CheckpointError(
                    f"tensor {name} is in both {self.tensors[name].file} and {file.name}"
                )
            part = handle.get_slice(name)
            dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
            self.tensors[name] = TensorInfo(
                shape=tuple(part.get_shape()), dtype=dtype, file=file.name
            )

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        handle = self._handles[self.tensors[name].file]
        if index is None:
            return handle.get_tensor(name)  # type: ignore[no-any-return]  # the library has no types
        return handle.get_slice(name)[index]  # type: ignore[no-any-return]

    def tokenizer(self, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase | None":
        if not any((self.folder / file).exists() for file in TOKENIZER_FILES):
            return None
        with _transformers:
            from transformers import AutoTokenizer

            try:
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=trust_remote_code
                )
            except Exception as error:  # whatever the library makes of broken files
                raise CheckpointError(
                    f"the tokenizer in {self.folder} cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return tokenizer

    def close(self) -> None:
        self._open_files.close()


def open_checkpoint(path: Path) -> SafetensorsCheckpoint:
    """Opens a folder, or the folder around one file.

    Raises:
        CheckpointError: config.json or a shard is missing, a file is truncated, a tensor is stored
            twice, or the index and the shards disagree.
    """
    if not path.is_dir():
        return SafetensorsCheckpoint(path.parent, [path])
    if (path / INDEX).exists():
        return _open_by_index(path)
    single = path / "model.safetensors"
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no {single.name} and no other .safetensors file")
    return SafetensorsCheckpoint(path, files)


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stored:
        return stored.read(len(LFS)) == LFS


def _open_by_index(folder: Path) -> SafetensorsCheckpoint:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} needs a weight_map from tensors to files")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    lacking = [file.name for file in files if not file.exists()]
    if lacking:
        raise CheckpointError(
            f"{folder / INDEX} names {', '.join(lacking)}, which {folder} lacks; "
            "fetch the checkpoint again"
        )
    checkpoint = SafetensorsCheckpoint(folder, files)
    for name, file in weight_map.items():
        info = checkpoint.tensors.get(name)
        if info is None or info.file != file:
            checkpoint.close()
            where = f"it is in {info.file}" if info else "no shard holds it"
            raise CheckpointError(
                f"{folder / INDEX} says that tensor {name} is in {file}, but {where}"
            )
    return checkpoint


def read_configuration(file: Path) -> Mapping[str, Any]:
    """A config.json, with how the weights are quantized where a file beside it says that:
    ModelOpt's, or the older ones of AWQ and GPTQ. Where both say it, config.json counts; but what
    ModelOpt says in its own file alone, as it once did of the KV cache, is added.

    "quantization_file" is added where another file has a part in that, for errors.

    Raises:
        CheckpointError: a file cannot be read, or several say it.
    """
    config = read_json(file)
    stored = config.get("quantization_config")
    beside = [name for name in QUANTIZATION_FILES if (file.parent / name).exists()]
    if stored is not None:  # ModelOpt 0.31 to 0.33 saved it without a method
        is_its = isinstance(stored, dict) and stored.get("quant_method", "modelopt") == "modelopt"
        beside = [MODELOPT_FILE] if is_its and MODELOPT_FILE in beside else []
    if not beside:
        return config
    if len(beside) > 1:
        raise CheckpointError(
            f"{' and '.join(beside)} in {file.parent} both say how it is quantized; one must go"
        )
    (name,) = beside
    found = {"quant_method": QUANTIZATION_FILES[name], **read_json(file.parent / name)}
    if stored is not None:
        found = _below(found, stored, file.parent / name)
        name = f"{file.name} and {name}"
    return {**config, "quantization_config": found, "quantization_file": name}


def _below(own: dict[str, Any], stored: dict[str, Any], file: Path) -> dict[str, Any]:
    """The settings of ModelOpt's own `file` below those `stored` in config.json: bare there, or in
    "quantization" as in the file."""
    settings, inner = own.pop("quantization", {}), stored.get("quantization")
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: quantization must be an object")
    bare = own | stored
    return bare | {"quantization": settings | inner} if isinstance(inner, dict) else settings | bare


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object from a file of the checkpoint."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; a checkpoint folder needs it") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content
