"""Which plan a layer gets: from a table measured on this GPU, the user's own before the one that
comes along, or by a rule close to it.

Plans of a table serve any dtype and top-k: the one that comes along was measured in bfloat16 with
top-8, one's own with those of the model that was tuned last.
"""

from functools import cache
from importlib.resources import as_file, files

import torch

from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import MAX_BUCKET, MAX_FEW, Plan, Row, Table, Tiling
from rackmount_registry.errors import ConfigError

SLOTS_A_TOKEN = 8
"""What the rule assumes."""
FEWER, MORE = 8, 4
"""A plan serves down to an eighth of the tokens that it was measured at, and up to four times as
many. Blocks that are too large compute in vain, which costs little while the memory is the limit;
those that are too small read weights again and again."""


def bucket_of(tokens: int) -> int:
    """Index into BUCKETS for `tokens`, at least 1."""
    return min((tokens - 1).bit_length(), MAX_BUCKET)


def shape_of(gate_up: Packed, down: Packed) -> str:
    """Key of a layer in a table."""
    return f"{gate_up.format} {len(gate_up.values)}x{down.rows}x{gate_up.rows // 2}"


def choose(gate_up: Packed, down: Packed, bucket: int, own: Table | None = None) -> Plan:
    """The plan for up to `bucket` tokens of a layer; of a bucket that both tables have, that of
    the user's `own`.

    Raises:
        ConfigError: `own` was measured on another GPU, or lacks the layer's shape.
    """
    if gate_up.values.device.type == "cuda":
        gpu, shape = torch.cuda.get_device_name(gate_up.values.device), shape_of(gate_up, down)
        if own is not None:
            _require(own, gpu, shape)
        row = dict[int, Plan]()
        for table in filter(None, (shipped(gpu), own)):
            row |= table.shapes.get(shape, {})
        if (plan := nearest(row, bucket)) is not None:
            return plan
    return rule(gate_up, down, bucket)


def _require(own: Table, gpu: str, shape: str) -> None:
    """Refuses a table that would be passed over."""
    if own.about["gpu"] != gpu:
        raise ConfigError(
            f"expert_kernel.triton.tuned: the table was measured on {own.about['gpu']}, and this "
            f"is {gpu}; choose one of this GPU, or none"
        )
    if shape not in own.shapes:
        raise ConfigError(
            f"expert_kernel.triton.tuned: no plans for {shape!r} (format, experts x hidden x "
            f"width of a rank's layer) in the table, which has: {', '.join(own.shapes) or 'none'}; "
            "choose one with it (`rackmount bench kernels MODEL --tune FILE` adds those that a "
            "model has at tp=1), or none"
        )


def nearest(row: Row, bucket: int) -> Plan | None:
    """That of the next bucket that was measured or, above all of them, of the largest; None where
    that is far away, or has no blocks and `bucket` is of many tokens."""
    measured = min((each for each in row if each >= bucket), default=max(row, default=0))
    if measured > FEWER * bucket or bucket > MORE * measured:
        return None
    plan = row[measured]
    return plan if plan.block_m or bucket <= MAX_FEW else None


@cache
def shipped(gpu: str) -> Table | None:
    """The table that comes along for GPUs of that name, if there is one."""
    found = files(__package__) / "tuned" / f"{gpu.replace(' ', '_')}.json"
    if not found.is_file():
        return None
    with as_file(found) as file:
        return Table.read(file)


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
