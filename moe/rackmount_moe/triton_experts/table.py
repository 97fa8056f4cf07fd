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
    """Columns read at a time. A product in blocks of a weight that is not dense has its own."""
    stages: int
    """Depth of the pipeline of loads; without blocks it is two."""
    warps: int
    programs: int = 0
    """Programs of a multiprocessor, which share the tiles; 0: one for each tile."""
    tma: bool = False
    """Whether the tensor memory accelerator loads the weight (compute capability 9.0 on)."""

    def __post_init__(self) -> None:
        for name in ("block_n", "block_k", "warps"):
            if not _is_power(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a power of two")
        if self.block_n < 2 or self.warps > MAX_WARPS or self.stages < 1 or self.programs < 0:
            raise ValueError(
                f"{self} must have block_n from 2, warps to {MAX_WARPS}, stages from 1 and "
                "programs from 0"
            )


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
        if self.block_m not in BLOCK_SIZES:
            legal = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_m={self.block_m!r} must be one of {legal}")
        if self.prefetch and not _is_power(self.prefetch):
            raise ValueError(f"prefetch={self.prefetch!r} must be a power of two, or 0")
        if self.block_m and min(self.gate_up.block_n, self.down.block_n) < 16:
            raise ValueError("block_n must be at least 16 where there are blocks")


def _is_power(number: int) -> bool:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


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

        def tiling(values: list) -> Tiling:
            return Tiling(**dict(zip(names, values, strict=True)))

        return cls(
            about=found,
            shapes={
                shape: {
                    _bucket(bucket): Plan(tiling(gate_up), tiling(down), block_m, prefetch)
                    for bucket, (block_m, prefetch, gate_up, down) in row.items()
                }
                for shape, row in shapes.items()
            },
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


def _bucket(text: str) -> int:
    if (bucket := int(text)) not in BUCKETS:
        raise ValueError(f"bucket {text} must be a power of two up to {BUCKETS[-1]}")
    return bucket


def _values(plan: Plan) -> str:
    tilings = (list(astuple(tiling)) for tiling in (plan.gate_up, plan.down))
    return json.dumps([plan.block_m, plan.prefetch, *tilings])
