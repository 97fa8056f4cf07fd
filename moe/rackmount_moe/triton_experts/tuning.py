"""How a layer's products are cut into programs: from the table measured on this GPU, or by a rule
close to it.

A table is a file `tuned/<GPU's name>.json`, written by `benchmarks/experts.py`:
`{"fields": names of Tiling's fields, "shapes": {"FORMAT ExHxI": {bucket: [block_m,
prefetch, gate_up's values, down's values]}}}`. A bucket is the least power of two that holds the
tokens. Tables are measured in bfloat16 with top-8; float16 shares them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from rackmount_moe.triton_experts.packing import Packed

MAX_FEW = 16
"""Tokens up to which a plan may have no blocks."""
MAX_BUCKET = 15
"""Tokens above 2 ** 15 share that bucket's plan."""
BUCKETS = tuple(1 << power for power in range(MAX_BUCKET + 1))
SLOTS_A_TOKEN = 8
"""What the rule assumes."""


@dataclass(frozen=True)
class Tiling:
    """How one product is cut; see `product.product_kernel`, or `vector.vector_kernel` for a plan
    without blocks."""

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


@dataclass(frozen=True)
class Plan:
    """How a layer is computed."""

    gate_up: Tiling
    down: Tiling
    block_m: int = 0
    """Slots of an expert in a block; 0: tokens are few, there are no blocks."""
    prefetch: int = 0
    """Lines of the second weight that each program of the first product calls into L2 at its end,
    where there are no blocks; a power of two, or 0."""


def bucket_of(tokens: int) -> int:
    """Index into BUCKETS for `tokens`, at least 1."""
    return min((tokens - 1).bit_length(), MAX_BUCKET)


def choose(gate_up: Packed, down: Packed, bucket: int) -> Plan:
    """The plan for up to `bucket` tokens of a layer."""
    experts, hidden, width = len(gate_up.values), down.rows, gate_up.rows // 2
    if gate_up.values.device.type == "cuda":
        table = table_of(torch.cuda.get_device_name(gate_up.values.device))
        plan = nearest(table.get(f"{gate_up.format} {experts}x{hidden}x{width}", {}), bucket)
        if plan is not None:
            return plan
    return rule(gate_up, down, bucket)


def nearest(row: Mapping[int, Plan], bucket: int) -> Plan | None:
    """That of the next bucket that was measured; above all of them, that of the largest."""
    measured = min((each for each in row if each >= bucket), default=max(row, default=0))
    plan = row.get(measured)
    return None if plan is None or (bucket > MAX_FEW and not plan.block_m) else plan


@cache
def table_of(gpu: str) -> Mapping[str, Mapping[int, Plan]]:
    """As `parse` gives it; empty where nothing was measured on GPUs of that name."""
    file = files(__package__) / "tuned" / f"{gpu.replace(' ', '_')}.json"
    return parse(json.loads(file.read_text())) if file.is_file() else {}


def parse(table: Mapping) -> Mapping[str, Mapping[int, Plan]]:
    """A table's shapes: "FORMAT ExHxI" -> bucket -> plan."""
    fields = table["fields"]

    def tiling(values: list) -> Tiling:
        return Tiling(**dict(zip(fields, values, strict=True)))

    return {
        shape: {
            int(bucket): Plan(tiling(gate_up), tiling(down), block_m, prefetch)
            for bucket, (block_m, prefetch, gate_up, down) in row.items()
        }
        for shape, row in table["shapes"].items()
    }


def rule(gate_up: Packed, down: Packed, bucket: int) -> Plan:
    """A guess for what was not measured: no blocks while few tokens share an expert; then blocks
    that hold about the tokens of an expert, and a pipeline short enough for several programs on a
    multiprocessor; large tiles once arithmetic is the limit, though not so large that only one
    program fits."""
    dense = gate_up.code == "dense"
    each = bucket * SLOTS_A_TOKEN / max(1, len(gate_up.values))
    if bucket <= 2:
        if dense:
            return Plan(Tiling(4, 512, 2, 2), Tiling(8, 256, 2, 8))
        return Plan(Tiling(16, 512, 2, 2), Tiling(8, 128, 2, 4))
    block_m = next((size for size in (16, 32, 64) if each <= 0.75 * size), 128)
    if block_m < 128:
        return Plan(Tiling(64, 128, 4, 4), Tiling(64, 128, 4, 4), block_m)
    if dense:
        return Plan(Tiling(128, 64, 3, 4), Tiling(128, 64, 3, 4), block_m)
    return Plan(Tiling(64, 128, 3, 4), Tiling(64, 128, 3, 4), block_m)
