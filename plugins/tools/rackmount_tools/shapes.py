"""Shapes of well-known models: a config.json each, for which nothing is downloaded, and the ways in
which checkpoints are quantized: a quantization_config each.

"llama-8b" is a shape, "llama-8b+gptq" the same with quantized weights.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rackmount_registry.errors import ConfigError, did_you_mean


def _files(folder: str) -> dict[str, Path]:
    return {file.stem: file for file in sorted((Path(__file__).parent / folder).glob("*.json"))}


SHAPES = _files("shapes")
"""By name."""
QUANTIZATIONS = _files("quantizations")
"""By name."""

ModelOrShape = Annotated[
    str,
    typer.Argument(
        help=f"A shape ({', '.join(SHAPES)}), which has random weights, perhaps quantized "
        f"({', '.join(f'+{name}' for name in QUANTIZATIONS)}, as in llama-8b+gptq); or a path to a "
        "folder or file, a hub id, or an alias.",
        show_default=False,
    ),
]


@contextmanager
def resolved(model: str, arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to give to an engine for `model`. The name of a shape stands for a config.json, which is
    there until the engine has started, and for random weights; what exists as a path is never
    taken for one.

    Raises:
        ConfigError: an unknown way to quantize a shape; or what was done with the model raised it,
            with the shapes if it is about the model's name.
    """
    shape, plus, how = model.partition("+")
    if shape not in SHAPES or Path(model).expanduser().exists():
        try:
            yield model, arguments
        except ConfigError as error:
            if not str(error).startswith(f"model={model!r} is neither"):
                raise
            raise ConfigError(
                f"{error}; nor a shape{did_you_mean(shape, SHAPES)}; shapes: {', '.join(SHAPES)}"
            ) from error
        return
    arguments = arguments | {"load_format": "dummy"}
    if not plus:
        yield str(SHAPES[shape]), arguments
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{model}.json"
        file.write_text(json.dumps(config_of(shape, how)))
        yield str(file), arguments


def config_of(shape: str, quantization: str) -> dict[str, Any]:
    """The config.json of a shape that is quantized in one of the `QUANTIZATIONS`."""
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"model='{shape}+{quantization}'{did_you_mean(quantization, QUANTIZATIONS)}: behind + "
            f"must stand one of {', '.join(QUANTIZATIONS)}"
        )
    config: dict[str, Any] = json.loads(SHAPES[shape].read_text())
    return config | {"quantization_config": json.loads(QUANTIZATIONS[quantization].read_text())}
