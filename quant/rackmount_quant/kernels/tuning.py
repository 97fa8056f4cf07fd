"""Which tiling a product of few rows gets: from the table measured on this GPU, or by a rule.

A table is a file `tuned/<GPU's name>.json`, written by `benchmarks/quant_gemm.py`, some of it after
`benchmarks/layer_tilings.py`:
`{"fields": names of Tiling's fields, "shapes": {"KIND NxK EPILOGUE": {bucket: values or null}}}`,
KIND as `Packed.kind`. A bucket is the least power of two that holds the rows; null says that the
product with the dequantized matrix was faster, "held" that programs which hold their tokens were.
One that is not there has what one with as many tokens a tile has. "row" is a bucket of its own, of
one row in `one_row_kernel`, with the names of RowTiling's fields in "row_fields"; null or none says
that another was faster.

"KIND rounded NxK EPILOGUE" has buckets where products of rounded rows were faster by
`ROUNDING_GAIN`; null says that of those the way for many rows was the fastest.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar, Literal, TypeVar

import torch

from rackmount_quant.kernels.packed import Packed
from rackmount_registry.formats import EPILOGUES

T = TypeVar("T")

MAX_ROWS = 256
"""Above it products are bound by arithmetic."""
BUCKETS = tuple(1 << power for power in range(MAX_ROWS.bit_length()))
RULED_ROWS = 64
"""The rule goes no further."""
RULED: Mapping[int, tuple[int, int, int | None, int]] = {
    8: (64, 4, None, 3),
    16: (128, 4, 128, 3),
    32: (128, 8, None, 2),
    64: (128, 8, None, 1),
}
"""Tokens a tile -> block_n, warps, registers and programs an SM: what registers and shared memory
of an SM allow. For shapes that were not timed it is a guess."""
MIN_BLOCK_N = 16
MOST_BYTES = 1 << 31
"""Of a weight's words: beside rounded inputs they are numbers of one byte, counted in int32."""
MMA_COLUMNS = 16
LAST_ADDS_M = 8
"""Up to so many tokens a tile the program that comes last adds up its parts."""
MAX_PARTS = 32
"""Programs that may share a tile: the kernel is unrolled over them."""
HELD_ROWS = 8
HELD_N, HELD_K = 16, 128
"""Most rows, rows of the weight a tile and columns of a block, where programs hold their tokens."""


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

    def waits(self, k: int, block_m: int, num_sms: int) -> bool:
        """Whether programs that share a tile wait for each other: of few tokens it is faster that
        one adds up all; and all of them must be able to run at once."""
        return block_m > LAST_ADDS_M and self.aligned(k) and self.parts(k) <= num_sms

    def planes(self, packed: Packed, block_m: int) -> bool:
        """Whether there is a product for each plane of words: where Triton makes them by mma.sync,
        not by the wgmma of compute capability 9.0, which wants 4 warps and 64 rows."""
        device = packed.words.device
        hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
        wide = self.block_n % 64 == 0 and self.warps % 4 == 0 and block_m >= 16
        plane = self.block_k // (packed.per_word // 2)
        return not (hopper and wide) and plane >= MMA_COLUMNS


@dataclass(frozen=True)
class RowTiling:
    """How a product of one row is cut into programs; see `one_row.one_row_kernel`."""

    block_n: int
    """Weight rows a program; with "silu_mul" half of them are gate rows."""
    step: int
    """Blocks that are read at a time, a power of two."""
    warps: int


@dataclass(frozen=True)
class HeldTiling:
    """A product of up to `HELD_ROWS` rows by programs that hold their tokens, one an SM with all of
    its registers; see `held_tokens.held_tokens_kernel`. It leaves nothing to tune."""

    warps: ClassVar[int] = 16
    """Of a program: each has other columns."""
    registers: ClassVar[int] = 128
    """Of a thread."""
    most_steps: ClassVar[int] = 2
    """Blocks of `HELD_K` columns whose tokens a warp can hold."""

    def steps(self, k: int) -> int:
        """Blocks for each warp, a power of two."""
        return 1 << (-(-k // (self.warps * HELD_K)) - 1).bit_length()

    def takes(self, packed: Packed) -> bool:
        """Whether it can make this weight's product."""
        whole = packed.format == "int4" and packed.panel == HELD_K
        grouped = packed.group > 0 and packed.group % HELD_K == 0
        even = packed.k % HELD_K == 0 and packed.n % HELD_N == 0
        room = self.steps(packed.k) <= self.most_steps
        return whole and grouped and even and room and block_k_of(packed) is not None


AnyTiling = Tiling | RowTiling | HeldTiling
Bucket = int | Literal["row"]
Table = Mapping[str, Mapping[Bucket, AnyTiling | None]]
Choose = Callable[[Packed, str, int], AnyTiling | None]
"""`choose(packed, epilogue, bucket)`; see `choose`."""
ROUNDING_GAIN = 0.95
"""Rounded rows must take no more of the exact product's time, or it is left exact."""
Way = Tiling | Literal["many", "exact"]
"""How rows are multiplied where the weight's scheme rounds them: rounded, by a tiling or as many
rows are, or as they are."""
ChooseRounded = Callable[[Packed, str, int], Way]


def block_m(bucket: int) -> int:
    """Tokens a tile: columns of one mma.sync at least, or all of the bucket."""
    return max(8, bucket)


def bucket_of(rows: int) -> int:
    """Index into BUCKETS of a product of `rows` rows, at least 1; past its end above MAX_ROWS."""
    return (rows - 1).bit_length()


def block_k_of(packed: Packed) -> int | None:
    """Columns of a block of this weight, so that a block lies in one group; None: there are no
    such blocks, or their sums could overflow, or their places int32."""
    columns = packed.panel or 128
    if packed.far or packed.words.nbytes >= MOST_BYTES:
        return None
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


def for_all(choose: Callable[[Packed, str, int], T], packed: Packed) -> dict[str, tuple[T, ...]]:
    """Epilogue -> the choice for each of BUCKETS."""
    return {
        epilogue: tuple(choose(packed, epilogue, bucket) for bucket in BUCKETS)
        for epilogue in ("none", *EPILOGUES)
    }


def choose(packed: Packed, epilogue: str, bucket: int) -> AnyTiling | None:
    """The tiling of a product on its weight's GPU; None: it is made as that of many rows.
    `epilogue` is one of `formats.EPILOGUES`, or "none"."""
    if block_k_of(packed) is None:
        return None
    properties = torch.cuda.get_device_properties(packed.words.device)
    row = table_of(properties.name).get(f"{packed.kind} {packed.n}x{packed.k} {epilogue}", {})
    if bucket == 1 and row.get("row") is not None:
        return row["row"]
    measured = [each for each in row if isinstance(each, int)]
    alike = [each for each in measured if block_m(each) == block_m(bucket)]
    if alike:
        nearest = min(alike, key=lambda each: abs(each - bucket))
        return row[nearest]
    return rule(packed, bucket, properties.multi_processor_count)


def choose_rounded(packed: Packed, epilogue: str, bucket: int) -> Way:
    """What was not measured stays exact; so does all on a device that is no GPU."""
    if packed.words.device.type != "cuda":
        return "exact"
    name = torch.cuda.get_device_name(packed.words.device)
    row = table_of(name).get(f"{packed.kind} rounded {packed.n}x{packed.k} {epilogue}", {})
    if bucket not in row:
        return "exact"
    tiling = row[bucket]
    assert not isinstance(tiling, RowTiling | HeldTiling)
    return tiling or "many"


@cache
def table_of(gpu: str) -> Table:
    """As `parse` gives it; empty where nothing was measured on GPUs of that name."""
    file = files(__package__) / "tuned" / f"{gpu.replace(' ', '_')}.json"
    return parse(json.loads(file.read_text())) if file.is_file() else {}


def parse(table: Mapping) -> Table:
    """A table's shapes: "KIND NxK EPILOGUE" -> bucket -> tiling, or None."""

    def tiling(bucket: str, values: list | str | None) -> AnyTiling | None:
        if values is None:
            return None
        if isinstance(values, str):
            assert values == "held"
            return HeldTiling()
        if bucket == "row":
            return RowTiling(**dict(zip(table["row_fields"], values, strict=True)))
        return Tiling(**dict(zip(table["fields"], values, strict=True)))

    return {
        shape: {
            "row" if bucket == "row" else int(bucket): tiling(bucket, values)
            for bucket, values in row.items()
        }
        for shape, row in table["shapes"].items()
    }


def rule(packed: Packed, bucket: int, num_sms: int) -> Tiling | None:
    """A guess for a shape that was not measured: some programs for every SM, each with the same
    part of a tile, and some 50 KB of loads under way in an SM; None above `RULED_ROWS` rows."""
    block_k = block_k_of(packed)
    if block_k is None or bucket > RULED_ROWS:
        return None
    block_n, warps, registers, programs = RULED[block_m(bucket)]
    blocks = -(-packed.k // block_k)
    units = -(-packed.n // block_n) * blocks
    shares = (s for s in range(-(-blocks // MAX_PARTS), blocks + 1) if blocks % s == 0)
    share = min(shares, key=lambda s: abs(math.log(units / s / (programs * num_sms))))
    return Tiling(block_n, block_k, share, 4, warps, prefetch=2, registers=registers)
