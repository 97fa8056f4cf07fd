"""Which tiling a product gets: from the table measured on this GPU, or by a rule close to it.

A table is a file `tuned/<GPU's name>.json`, written by `benchmarks/decode_gemm.py`:
`{"fields": names of Tiling's fields, "shapes": {"NxK epilogue": {bucket: values or null}}}`. A
bucket is the least power of two that holds the rows; null says that cuBLAS was faster. Tables are
measured in bfloat16; float16 has the same size and the same instructions, and shares them. On a
GPU without a table every product is cuBLAS's.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

MAX_ROWS = 256
"""Above it products are cuBLAS's: they are bound by arithmetic."""
BUCKETS = tuple(1 << power for power in range(MAX_ROWS.bit_length()))
RULED_ROWS = 16
"""The rule goes no further. Up to here the H200's table has the kernel, tuned, faster on every
shape but one, the plain product of 28672 x 4096; at 64 rows cuBLAS wins shapes of each model."""
LEAST_RULED_WEIGHT = 1024 * 2048
"""Nor does it go below the smallest weight of that table."""
MIN_BLOCK_N = 16
MAX_PARTS = 32
"""Programs that may share a tile: the kernel is unrolled over them."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into programs; see `kernel.linear_kernel`."""

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
    tma: bool
    """Whether the tensor memory accelerator loads the weight (compute capability 9.0 on)."""

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


def block_m(bucket: int) -> int:
    """Tokens a tile: what the MMA takes at least, or all of the bucket."""
    return max(16, bucket)


def bucket_of(rows: int) -> int:
    """Index into BUCKETS of a product of `rows` rows, at least 1; past its end above MAX_ROWS."""
    return (rows - 1).bit_length()


def choose(weight: Tensor, epilogue: str, bucket: int) -> Tiling | None:
    """The tiling of a product with weight [N, K] on its GPU; None: cuBLAS is faster, or nothing is
    known. `epilogue` is one of `formats.EPILOGUES`, or "none"."""
    n, k = weight.shape
    properties = torch.cuda.get_device_properties(weight.device)
    table = table_of(properties.name)
    row = table.get(f"{n}x{k} {epilogue}")
    if row is not None:
        return row.get(bucket)
    if not table:
        return None
    return rule(n, k, bucket, properties.multi_processor_count)


@cache
def table_of(gpu: str) -> Mapping[str, Mapping[int, Tiling | None]]:
    """As `parse` gives it; empty where nothing was measured on GPUs of that name."""
    file = files(__package__) / "tuned" / f"{gpu.replace(' ', '_')}.json"
    return parse(json.loads(file.read_text())) if file.is_file() else {}


def parse(table: Mapping) -> Mapping[str, Mapping[int, Tiling | None]]:
    """A table's shapes: "NxK epilogue" -> bucket -> tiling, or None for cuBLAS."""
    fields = table["fields"]
    return {
        shape: {
            int(bucket): values and Tiling(**dict(zip(fields, values, strict=True)))
            for bucket, values in row.items()
        }
        for shape, row in table["shapes"].items()
    }


def rule(n: int, k: int, bucket: int, num_sms: int) -> Tiling | None:
    """A guess for a shape that was not measured, on a GPU where others were: two programs an SM,
    equal work for each, and about 100 KB of loads under way in either.

    None, so that cuBLAS makes the product, where the table gives no reason to expect better: above
    `RULED_ROWS` rows, and for weights below `LEAST_RULED_WEIGHT`.
    """
    if bucket > RULED_ROWS or n * k < LEAST_RULED_WEIGHT or k % 128 or n % 16:
        return None
    block_n, block_k = 64, 128
    even = -(-(-(-n // block_n) * (k // block_k)) // (2 * num_sms))
    tilings = (
        Tiling(block_n, block_k, share, stages=5, warps=4, prefetch=2, tma=False)
        for share in itertools.count(even)
    )
    return next(tiling for tiling in tilings if tiling.parts(k) <= MAX_PARTS)
