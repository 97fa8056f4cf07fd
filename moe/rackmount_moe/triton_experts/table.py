"""How layers are cut into programs, as data: plans, and the files that hold those measured on a
GPU.

A table is JSON: `{"gpu": its name, ..., "fields": names of Tiling's fields, "shapes": {"FORMAT
ExHxI": {bucket: [block_m, prefetch, gate_up's values, down's values]}}}`. A bucket is the least
power of two that holds the tokens. `rackmount bench kernels --tune` writes one, and the option
`tuned` of expert kernel "triton" reads it; `tuned/<GPU's name>.json` are those that come along.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rackmount_registry.errors import ConfigError

MAX_FEW = 16
"""Tokens up to which a plan may have no blocks."""
MAX_BUCKET = 15
"""Tokens above 2 ** 15 share that bucket's plan."""
BUCKETS = tuple(1 << power for power in range(MAX_BUCKET + 1))
BLOCK_SIZES = (0, 16, 32, 64, 128)
MAX_WARPS = 32
MAX_REGISTERS = 255
"""Of a thread."""
LEAST = {"block_n": 2, "block_k": 16, "stages": 1, "warps": 1, "programs": 0, "registers": 0}
"""Of a tiling's numbers."""


@dataclass(frozen=True)
class Tiling:
    """How one product is cut; see `product.product_kernel`, or `vector.vector_kernel` for a plan
    without blocks.

    Raises:
        ValueError: numbers that no kernel takes.
    """

    block_n: int
    """Weight rows a tile; of gate and up rows half are gate rows."""
    block_k: int
    """Columns read at a time, of each choice where there are no blocks. A product in blocks of a
    weight that is not dense has its own."""
    stages: int
    """Depth of the pipeline of loads. Without blocks it is two in a loop; there is no loop where so
    many steps are all."""
    warps: int
    programs: int = 0
    """Programs of a multiprocessor, which share the tiles; 0: one for each tile."""
    tma: bool = False
    """Whether the tensor memory accelerator loads the weight (compute capability 9.0 on)."""
    registers: int = 0
    """A bound for a thread's, so that more programs fit a multiprocessor; 0: none. Of products in
    blocks alone."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number, {least} at least")
        for name in ("block_n", "block_k", "warps"):
            if not _is_power(value := getattr(self, name)):
                raise ValueError(f"{name}={value} must be a power of two")
        if self.warps > MAX_WARPS:
            raise ValueError(f"warps={self.warps} must be {MAX_WARPS} at most")
        if self.registers > MAX_REGISTERS:
            raise ValueError(f"registers={self.registers} must be {MAX_REGISTERS} at most")
        if not isinstance(self.tma, bool):
            raise ValueError(f"tma={self.tma!r} must be true or false")


@dataclass(frozen=True)
class Plan:
    """How a layer is computed.

    Raises:
        ValueError: numbers that no kernel takes.
    """

    gate_up: Tiling
    down: Tiling
    block_m: int = 0
    """Slots of an expert in a block; 0: tokens are few, there are no blocks."""
    prefetch: int = 0
    """Lines of the second weight that each program of the first product calls into L2 at its end,
    where there are no blocks; a power of two, or 0."""

    def __post_init__(self) -> None:
        if type(self.block_m) is not int or self.block_m not in BLOCK_SIZES:
            legal = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_m={self.block_m!r} must be one of {legal}")
        if self.prefetch != 0 and not _is_power(self.prefetch):
            raise ValueError(f"prefetch={self.prefetch!r} must be a power of two, or 0")
        if self.block_m and (least := min(self.gate_up.block_n, self.down.block_n)) < 16:
            raise ValueError(f"block_n={least} must be at least 16 where there are blocks")


def _is_power(number: object) -> bool:
    return type(number) is int and number > 0 and number & (number - 1) == 0


Row = Mapping[int, Plan]
"""Bucket -> plan, of one shape."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What was measured."""

    about: Mapping[str, Any]
    """What else the file says; "gpu" is where it was measured."""
    shapes: Mapping[str, Row]
    """"FORMAT ExHxI" -> plans."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Raises:
            ValueError, TypeError, KeyError, AttributeError: no such table.
        """
        found = json.loads(text)
        names, shapes = found.pop("fields"), found.pop("shapes")
        if not isinstance(found["gpu"], str):
            raise TypeError(f"gpu={found['gpu']!r} must be a name")
        return cls(
            about=found, shapes={shape: _row(shape, row, names) for shape, row in shapes.items()}
        )

    @classmethod
    def read(cls, file: Path) -> Self:
        """
        Raises:
            ConfigError: the file is not there, or holds something else.
        """
        try:
            return cls.parse(file.read_text())
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{file} is no table of expert tilings ({type(error).__name__}: {error}); "
                "`rackmount bench kernels MODEL --tune FILE` writes one"
            ) from error

    def extended(self, shape: str, row: Row) -> "Table":
        """With more plans for a shape, in place of older ones."""
        merged = {**self.shapes.get(shape, {}), **row}
        return replace(self, shapes={**self.shapes, shape: dict(sorted(merged.items()))})

    def text(self) -> str:
        """What `parse` takes, with a line for each shape and bucket."""
        shapes = []
        for shape, row in self.shapes.items():
            lines = ",\n".join(f"   {json.dumps(str(b))}: {_values(p)}" for b, p in row.items())
            shapes.append(f"  {json.dumps(shape)}: {{\n{lines}}}")
        names = [field.name for field in fields(Tiling)]
        head = json.dumps({**self.about, "fields": names})
        body = ",\n".join(shapes)
        return f'{head[:-1]},\n "shapes": {{\n{body}}}}}\n'


def _row(shape: str, row: Mapping[str, list[Any]], names: list[str]) -> Row:
    """Of a shape, as the file has it; errors say of which bucket."""

    def tiling(values: list[Any]) -> Tiling:
        found = Tiling(**dict(zip(names, values, strict=True)))
        if found.tma and not shape.startswith("dense "):
            raise ValueError("tma=True is for dense weights alone")
        return found

    plans = {}
    for bucket, values in row.items():
        try:
            block_m, prefetch, gate_up, down = values
            plans[_bucket(bucket)] = Plan(tiling(gate_up), tiling(down), block_m, prefetch)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{shape!r} at {bucket}: {error}") from error
    return plans


def _bucket(text: str) -> int:
    if (bucket := int(text)) not in BUCKETS:
        raise ValueError(f"bucket {text} must be a power of two up to {BUCKETS[-1]}")
    return bucket


def _values(plan: Plan) -> str:
    tilings = (list(astuple(tiling)) for tiling in (plan.gate_up, plan.down))
    return json.dumps([plan.block_m, plan.prefetch, *tilings])
