"""Which tiling a product of few rows gets: from the table measured on this GPU, or by a rule.

A table is a file `tuned/<GPU's name>.json`, written by `benchmarks/quant_gemm.py`:
`{"fields": names of Tiling's fields, "shapes": {"KIND NxK EPILOGUE": {bucket: values or null}}}`,
KIND as `Packed.kind`. A bucket is the least power of two that holds the rows; null says that the
way for many rows was faster.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from rackmount_quant.kernels.packed import Packed

MAX_ROWS = 256
"""Above it products are bound by arithmetic."""
BUCKETS = tuple(1 << power for power in range(MAX_ROWS.bit_length()))
RULED_ROWS = 64
"""The rule goes no further."""
MIN_BLOCK_N = 32
MAX_PARTS = 32
"""Programs that may share a tile: the kernel is unrolled over them."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into programs; see `few_rows.few_rows_kernel`."""

    block_n: int
    """Weight rows a tile; with "silu_mul" half of them are gate rows."""
    block_k: int
    share: int
    """Blocks of block_n * block_k that a program sums."""
    stages: int
    """Depth of the pipeline of loads."""
    warps: int
    prefetch: int
    """Blocks called into L2 while the kernel before still runs; a power of two, or 0."""
    registers: int | None
    """A bound for a thread's, so that more programs fit an SM; None: as many as it likes."""

    def parts(self, k: int) -> int:
        """The most programs that share a tile."""
        blocks = -(-k // self.block_k)
        if self.aligned(k):
            return blocks // self.share
        if self.share % blocks == 0:
            return 1
        return 1 + -(-(blocks - 1) // self.share)

    def aligned(self, k: int) -> bool:
        """Whether no program has blocks of two tiles."""
        return -(-k // self.block_k) % self.share == 0


Choose = Callable[[Packed, str, int], Tiling | None]
"""`choose(packed, epilogue, bucket)`; see `choose`."""


def block_m(bucket: int) -> int:
    """Tokens a tile: what Triton's MMA takes at least, or all of the bucket."""
    return max(16, bucket)


def bucket_of(rows: int) -> int:
    """Index into BUCKETS of a product of `rows` rows, at least 1; past its end above MAX_ROWS."""
    return (rows - 1).bit_length()


def block_k_of(packed: Packed) -> int | None:
    """Columns of a block of this weight, so that a block lies in one group; None: there are no
    such blocks."""
    columns = packed.panel or 128
    if not packed.group:
        return columns
    return next(
        (
            each
            for each in (128, 64, 32, 16)
            if packed.group % each == 0 and (packed.panel in (None, each))
        ),
        None,
    )


def choose(packed: Packed, epilogue: str, bucket: int) -> Tiling | None:
    """The tiling of a product on its weight's GPU; None: it is made as that of many rows.
    `epilogue` is one of `formats.EPILOGUES`, or "none"."""
    if block_k_of(packed) is None:
        return None
    properties = torch.cuda.get_device_properties(packed.words.device)
    row = table_of(properties.name).get(f"{packed.kind} {packed.n}x{packed.k} {epilogue}")
    if row is not None:
        return row.get(bucket)
    return rule(packed, bucket, properties.multi_processor_count)


@cache
def table_of(gpu: str) -> Mapping[str, Mapping[int, Tiling | None]]:
    """As `parse` gives it; empty where nothing was measured on GPUs of that name."""
    file = files(__package__) / "tuned" / f"{gpu.replace(' ', '_')}.json"
    return parse(json.loads(file.read_text())) if file.is_file() else {}


def parse(table: Mapping) -> Mapping[str, Mapping[int, Tiling | None]]:
    """A table's shapes: "KIND NxK EPILOGUE" -> bucket -> tiling, or None."""
    fields = table["fields"]
    return {
        shape: {
            int(bucket): values and Tiling(**dict(zip(fields, values, strict=True)))
            for bucket, values in row.items()
        }
        for shape, row in table["shapes"].items()
    }


def rule(packed: Packed, bucket: int, num_sms: int) -> Tiling | None:
    """A guess for a shape that was not measured: programs for every SM, equal work for each, and
    some 50 KB of loads under way in an SM; None above `RULED_ROWS` rows."""
    block_k = block_k_of(packed)
    if block_k is None or bucket > RULED_ROWS:
        return None
    few = bucket <= 16
    block_n = 128 if few and packed.n >= 128 * num_sms // 4 else 64
    programs = 4 if few else 2
    blocks = -(-packed.k // block_k)
    units = -(-packed.n // block_n) * blocks
    even = -(-units // (programs * num_sms))
    share = max(even, -(-blocks // (MAX_PARTS // 2)))
    return Tiling(block_n, block_k, share, 4, 4, prefetch=2, registers=128 if few else None)
