"""Shapes of well-known models: a config.json each, for which nothing is downloaded."""

from pathlib import Path
from typing import Annotated, Any

import typer

SHAPES = {file.stem: file for file in sorted((Path(__file__).parent / "shapes").glob("*.json"))}
"""By name."""

ModelOrShape = Annotated[
    str,
    typer.Argument(
        help=f"A shape ({', '.join(SHAPES)}), which has random weights; or a path to a folder or "
        "file, a hub id, or an alias.",
        show_default=False,
    ),
]


def resolve(model: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What to give to an engine for `model`. The name of a shape stands for its file and for random
    weights; what exists as a path is never taken for one."""
    if model in SHAPES and not Path(model).expanduser().exists():
        return str(SHAPES[model]), arguments | {"load_format": "dummy"}
    return model, arguments
