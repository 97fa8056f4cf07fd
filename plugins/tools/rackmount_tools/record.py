"""What a benchmark leaves: a table for people, a file for later."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from rackmount import Engine, Rack
from rackmount_registry.errors import ConfigError
from rackmount_registry.plain import as_plain
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.machine import describe_machine, driver_version


def writable(param: typer.CallbackParam, file: Path | None) -> Path | None:
    """The callback of an option for a file to write: refused before anything is measured for it.

    Raises:
        ConfigError: a folder, or what may not be written, or a file in no folder that may be.
    """
    if file is not None:
        asked = (
            f"{param.opts[0].removeprefix('--')}={str(file)!r} must be a file that can be written"
        )
        if file.is_dir():
            raise ConfigError(f"{asked}, and is a folder")
        if not file.exists() and not file.parent.is_dir():
            raise ConfigError(f"{asked}, and there is no folder {str(file.parent)!r}")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"{asked}, and that is not permitted")
    return file


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        callback=writable,
        help="File for the figures, the machine and what was mounted.",
    ),
]

FILE_WIDTH = 160
"""Columns of text where nobody's screen says how many there are."""


def print_table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """`rows` as a table; `columns` are key -> heading, and a share is written in percent. A column
    in which nothing stands is left out."""
    filled = {key for row in rows for key, value in row.items() if value is not None}
    columns = {key: text for key, text in columns.items() if key in filled}
    table = Table(*columns.values(), title=title)
    for row in rows:
        table.add_row(*(_cell(key, row.get(key)) for key in columns))
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("share"):
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def write_record(file: Path | None, figures: dict[str, Any]) -> None:
    """Writes the figures with the command and the machine, where a file is asked for."""
    if file is not None:
        record = {
            "command": shlex.join(["rackmount", *sys.argv[1:]]),
            "machine": describe_machine("rackmount-core") | describe_card(),
            **figures,
        }
        file.write_text(json.dumps(record, indent=2) + "\n")


def describe_card() -> dict[str, object]:
    """The GPU with its CUDA and its driver, where there is one."""
    if not torch.cuda.is_available():
        return {}
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def describe_engine(engine: Engine) -> dict[str, Any]:
    """What was asked for, which parts serve it, and the size of its KV pool."""
    return describe_rack(engine.rack) | {"num_kv_blocks": engine.core.num_kv_blocks}


def describe_rack(rack: Rack) -> dict[str, Any]:
    """What was asked for, and which parts serve it."""
    parts = [*rack.parts.offers(), rack.attention.prefill, rack.attention.decode, rack.executor]
    if rack.scheme is not None:
        parts.append(rack.scheme)
    return {
        "arguments": as_plain(rack.config),
        "dtype": str(rack.dtype).removeprefix("torch."),
        "kv_dtype": str(rack.kv_dtype).removeprefix("torch."),
        "device": str(rack.device),
        "block_size": rack.block_size,
        "decode_sizes": rack.decode_sizes,
        "mixed_sizes": rack.mixed_sizes,
        "parts": sorted({f"{each.descriptor.kind}: {each.name}" for each in parts}),
    }


def describe_ceilings(ceilings: Ceilings) -> dict[str, Any]:
    """In terabytes and teraflops per second; floors count with the better of read and copy."""
    measured = {name: value for name, value in asdict(ceilings).items() if value is not None}
    return {f"{name}_T": round(value / 1e12, 4) for name, value in measured.items()}


def print_ceilings(ceilings: Ceilings) -> None:
    """One line, with units."""
    units = {"read": "TB/s", "copy": "TB/s", "int8": "TOP/s"}
    figures = [
        f"{name} {_cell(name, value / 1e12)} {units.get(name, 'TFLOP/s')}"
        for name, value in asdict(ceilings).items()
        if value is not None
    ]
    typer.echo(f"ceilings: {', '.join(figures)}")
