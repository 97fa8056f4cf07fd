"""The search for tilings of products of few rows with quantized weights; see `quant_gemm.py`."""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from decode_gemm import CEILING, SHARED_MEMORY, serialize
from quant_weights import DTYPE, FORMATS, Bench, bytes_of

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.linear import Prepared, plan
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.tuning import AnyTiling, HeldTiling, RowTiling, Tiling
from rackmount_registry.device.launch import launch_options

T = TypeVar("T", Tiling, RowTiling, HeldTiling)

CUTS: dict[int, tuple[tuple[int, int, int | None], ...]] = {
    8: ((64, 4, None), (128, 4, None), (64, 2, None), (128, 2, None), (32, 2, None)),
    16: ((64, 4, None), (128, 4, 128), (64, 2, None), (128, 2, None), (256, 8, 128)),
    32: ((64, 4, None), (128, 4, None), (128, 8, None), (256, 8, None), (256, 16, None)),
    64: ((64, 4, None), (128, 4, None), (128, 8, 128), (256, 8, None), (256, 16, None)),
    128: ((128, 4, None), (128, 8, None), (256, 8, None), (256, 16, 128)),
    256: ((64, 4, None), (128, 8, None)),
}
"""Tokens a tile -> (block_n, warps, bound of registers) that are tried."""
STAGES = (3, 4, 6, 8)
LEAST_PROGRAMS, MOST_PROGRAMS = 0.7, 8
"""An SM."""
FEWEST_BYTES_IN_FLIGHT = 32 << 10
"""Of an SM: less cannot hide the memory's latency."""


ROW_CUTS = tuple(itertools.product((4, 8, 16, 32), (2, 4, 8)))
"""block_n, warps of programs for one row."""
ROW_STEPS = (8, 16, 32)
"""Blocks at a time, beside all."""
LEAST_BYTES, MOST_BYTES, MOST_LOOPED_BYTES = 32, 512, 128
"""Of words that a thread of those has at a time; in a loop it loads as many ahead."""


@dataclass(frozen=True)
class Problem:
    form: str
    n: int
    k: int
    rows: int
    epilogue: str


def candidates(problem: Problem, first: Prepared, num_sms: int) -> Iterator[Tiling]:
    """Cuts of the weight; whole tiles or equal parts of them for each program, so that there are
    one to eight programs an SM, or as many blocks for each as fill the SMs evenly."""
    packed, k = first.packed, problem.k
    width, block_m = tuning.block_k_of(packed), tuning.block_m(problem.rows)
    if width is None:
        return
    rounded = FORMATS[problem.form].rounded is not None
    wider = packed.panel is None and not packed.group and k % 256 == 0
    wider = wider and (rounded or block_m <= 16)
    widths = (width, 256) if wider else (width,)
    for (block_n, warps, registers), block_k in itertools.product(CUTS[block_m], widths):
        blocks = -(-k // block_k)
        units = -(-problem.n // block_n) * blocks
        read = block_n * block_k // packed.per_word * 4
        shares = {share for share in range(1, blocks + 1) if blocks % share == 0}
        shares |= {-(-units // (num_sms * programs)) for programs in (2, 4)}
        for share, stages in itertools.product(sorted(shares), STAGES):
            programs = units / share / num_sms
            tiling = Tiling(block_n, block_k, share, stages, warps, 2, registers)
            if not LEAST_PROGRAMS <= programs <= MOST_PROGRAMS or stages > share + 1:
                continue
            stage = read + (1 if rounded else 2) * block_m * block_k
            resident = min(programs, SHARED_MEMORY // ((stages - 1) * stage))
            in_flight = min(stages - 1, share) * read * resident
            enough = in_flight >= FEWEST_BYTES_IN_FLIGHT or stages == min(share + 1, STAGES[-1])
            if resident > 0 and enough and tiling.parts(k) <= tuning.MAX_PARTS:
                yield tiling


def row_candidates(problem: Problem, first: Prepared) -> Iterator[RowTiling]:
    """Cuts of the weight for one row; in a loop a thread has the same columns of all its rows."""
    packed = first.packed
    width = tuning.block_k_of(packed)
    if width is None or problem.rows != 1 or FORMATS[problem.form].rounded is not None:
        return
    whole = triton.next_power_of_2(-(-problem.k // width))
    block_bytes = width // packed.per_word * 4
    for (block_n, warps), step in itertools.product(ROW_CUTS, sorted({*ROW_STEPS, whole})):
        read = block_n * step * block_bytes // (32 * warps)
        most = MOST_BYTES if step == whole else MOST_LOOPED_BYTES
        alike = step == whole or step * block_bytes >= 16 * 32 * warps
        if step <= whole and alike and LEAST_BYTES <= read <= most:
            yield RowTiling(block_n, step, warps)


def held_candidates(problem: Problem, first: Prepared) -> Iterator[HeldTiling]:
    """Whether programs may hold the tokens."""
    exact = FORMATS[problem.form].rounded is None
    if exact and problem.rows <= tuning.HELD_ROWS and HeldTiling().takes(first.packed):
        yield HeldTiling()


def build(packed: Packed, problem: Problem, tiling: AnyTiling) -> None:
    """Compiles a kernel into Triton's cache on disk; in a process of its own."""
    meta, silu = torch.device("meta"), problem.epilogue == "silu_mul"
    arrivals = torch.empty(packed.n, dtype=torch.int32, device=meta)
    prepared = Prepared(packed=packed, arrivals=arrivals, tilings={})
    x = torch.empty((problem.rows, problem.k), dtype=DTYPE, device=meta)
    rounding = FORMATS[problem.form].rounded
    columns = problem.n // 2 if silu else problem.n
    out = torch.empty((problem.rows, columns), dtype=DTYPE, device=meta)
    residual = out if problem.epilogue == "add" else None
    given = x if rounding is None else rounding.empty(x)
    kernel, grid, arguments = plan(tiling, given, prepared, None, residual, out, silu)
    arguments |= launch_options(torch.device("cuda")) | {"COMPILED": True}
    kernel.warmup(grid=grid, **arguments)


def key(problem: Problem, tiling: AnyTiling) -> tuple[Any, ...]:
    """What a compiled kernel depends on."""
    if isinstance(tiling, RowTiling):
        return problem.form, problem.k, tiling, problem.epilogue
    if isinstance(tiling, HeldTiling):
        return problem.form, problem.n, problem.k, tiling, problem.epilogue
    parts = triton.next_power_of_2(tiling.parts(problem.k))
    aligned, even = tiling.aligned(problem.k), problem.k % tiling.block_k == 0
    block_m, whole = tuning.block_m(problem.rows), replace(tiling, share=0)
    return problem.form, block_m, whole, parts, aligned, even, problem.epilogue


def on_meta(packed: Packed) -> Packed:
    """The weight without its memory, for another process."""
    tensors = {name: getattr(packed, name) for name in ("words", "scales", "zeros", "ratios")}
    return replace(packed, **{n: t if t is None else t.to("meta") for n, t in tensors.items()})


ANCHORS = (8, 16, 32, 64, 128, 256)
"""Buckets that are searched, one for each number of tokens a tile; the others take what is best
there."""
NAMED_FAILURES = 3
"""Of a round: more are only counted."""


def values_of(tiling: AnyTiling) -> list | str:
    """As a table has it."""
    return "held" if isinstance(tiling, HeldTiling) else list(astuple(tiling))


class Search:
    """Builds and times tilings, the first ones of each problem first, until time is up."""

    def __init__(self, bench: Bench, pool: ProcessPoolExecutor, seconds: float) -> None:
        self.bench = bench
        self.pool = pool
        self.seconds = seconds
        self.start = time.monotonic()
        self.rankings: dict[Problem, dict[AnyTiling, float]] = {}
        self.many_us: dict[Problem, float] = {}

    def first(self, problem: Problem) -> Prepared:
        return self.bench.copies(problem.form, problem.n, problem.k)[0]

    def best(self, problem: Problem, count: int, kind: type[T]) -> list[T]:
        ranking = {
            tiling: us
            for tiling, us in self.rankings.get(problem, {}).items()
            if isinstance(tiling, kind) and us < float("inf")
        }
        return sorted(ranking, key=ranking.__getitem__)[:count]

    def round(
        self,
        name: str,
        wanted: Mapping[Problem, Sequence[AnyTiling]],
        until: float,
    ) -> None:
        """Times what is wanted, to a share `until` of the time."""
        turns = itertools.zip_longest(*([(p, t) for t in wanted[p]] for p in wanted))
        pairs = [pair for turn in turns for pair in turn if pair is not None]
        kernels: dict[tuple[Any, ...], Future] = {}
        for problem, tiling in pairs:
            if (kernel := key(problem, tiling)) not in kernels:
                packed = on_meta(self.first(problem).packed)
                kernels[kernel] = self.pool.submit(build, packed, problem, tiling)
        timed, failures = 0, 0
        for problem, tiling in pairs:
            left = until * self.seconds - self.elapsed()
            try:
                kernels[key(problem, tiling)].result(timeout=max(left, 0.0))
            except TimeoutError:
                break
            except Exception as error:  # told, and the next one is tried
                failures += 1
                if failures <= NAMED_FAILURES:
                    print(f"cannot be built: {problem} {tiling}: {error!r:.300}")
                continue
            us = self.bench.us(*astuple(problem), tiling)
            ranking = self.rankings.setdefault(problem, {})
            if us < min(ranking.values(), default=float("inf")):
                print(f"{self.elapsed():4.0f} s {problem} {us:.2f} us {tiling}", flush=True)
            ranking[tiling] = us
            timed += 1
        for future in kernels.values():
            future.cancel()
        print(
            f"{name}: {len(kernels)} kernels, {failures} tilings fail, {timed} of {len(pairs)} "
            f"timed by {self.elapsed():.0f} s",
            flush=True,
        )

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def run(self, formats: list[str], shapes: dict, rows: list[int], out: Path) -> None:
        """Rounds, after each of which the table is written."""
        num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        sizes = {tuning.block_m(r) for r in rows}
        anchors = [anchor for anchor in ANCHORS if tuning.block_m(anchor) in sizes]
        weights = list(itertools.product(formats, shapes.values()))
        searched = [Problem(f, n, k, r, e[0]) for f, (n, k, e) in weights for r in anchors]
        near = {}
        for (form, (n, k, epilogues)), r in itertools.product(weights, rows):
            anchor = next(a for a in anchors if tuning.block_m(a) == tuning.block_m(r))
            for epilogue in epilogues:
                near[Problem(form, n, k, r, epilogue)] = Problem(form, n, k, anchor, epilogues[0])
        cuts = {p: list(candidates(p, self.first(p), num_sms)) for p in searched}
        self.round("cuts", cuts, 0.5)
        self.write(near, out)
        of_one = {p: list(row_candidates(p, self.first(p))) for p in near}
        self.round("one row", of_one, 0.6)
        self.write(near, out)
        held = {p: list(held_candidates(p, self.first(p))) for p in near}
        self.round("held tokens", held, 0.75)
        self.write(near, out)
        ahead = {
            p: [
                replace(t, prefetch=blocks)
                for t in self.best(p, 3, Tiling)
                for blocks in (0, 1, 4, 8)
            ]
            for p in searched
        }
        self.round("prefetching", ahead, 0.85)
        self.write(near, out)
        self.round("epilogues", {p: self.best(near[p], 3, Tiling) for p in near}, 1.0)
        self.write(near, out)

    def write(self, near: dict[Problem, Problem], out: Path) -> None:
        """The table, or more of it: of each problem the best tiling that was timed for it, or else
        for the one near it, or that which holds its tokens, where it was the faster, and null where
        the way for many rows, if timed, was; of one row the best of its own, and null where that is
        not the fastest. Rounded rows that gain too little over exact ones, timed in the same
        search, are left out."""
        table: dict[str, dict[str, list | str | None]] = {}
        for problem, other in near.items():
            source = problem if self.best(problem, 1, Tiling) else other
            for tiling in self.best(source, 1, Tiling):
                first, us = self.first(problem), self.rankings[source][tiling]
                shape = f"{problem.n}x{problem.k} {problem.epilogue}"
                many, rounded = self.many(problem), FORMATS[problem.form].rounded is not None
                gains = min(us, many) <= tuning.ROUNDING_GAIN * self.exact(problem)
                values = values_of(tiling) if us < many else None
                kind = f"{first.packed.kind} rounded" if rounded else first.packed.kind
                row = table.setdefault(f"{kind} {shape}", {}) if gains or not rounded else {}
                row[str(problem.rows)] = values
                self.tell(problem, us, f"many {many:>7.2f} us  {row[str(problem.rows)]}")
                fastest = min(us, many)
                for held in self.best(problem, 1, HeldTiling):
                    alone = self.rankings[problem][held]
                    if alone < fastest:
                        row[str(problem.rows)], fastest = values_of(held), alone
                    self.tell(problem, alone, "held tokens")
                for cut in self.best(problem, 1, RowTiling):
                    alone = self.rankings[problem][cut]
                    row["row"] = values_of(cut) if alone < fastest else None
                    self.tell(problem, alone, f"one row {cut}")
        known = json.loads(out.read_text())["shapes"] if out.is_file() else {}
        for shape, row in table.items():
            known[shape] = known.get(shape, {}) | row
        gpu = torch.cuda.get_device_name()
        about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
        names = {
            "fields": [field.name for field in fields(Tiling)],
            "row_fields": [field.name for field in fields(RowTiling)],
        }
        out.write_text(serialize(about | names | {"shapes": known}))

    def tell(self, problem: Problem, us: float, more: str) -> None:
        shape, first = f"{problem.n}x{problem.k} {problem.epilogue}", self.first(problem)
        rate = bytes_of(first) / us * 1e6
        print(
            f"{problem.form:<12}{shape:<24}{problem.rows:>4} {us:>7.2f} us "
            f"{rate / 1e12:.2f} TB/s {100 * rate / CEILING:5.1f} %, {more}",
            flush=True,
        )

    def exact(self, problem: Problem) -> float:
        """Microseconds of the exact product of as many rows, as far as it was timed."""
        twin = replace(problem, form=problem.form.removesuffix("-rounded"))
        return min(self.rankings.get(twin, {}).values(), default=float("inf"))

    def many(self, problem: Problem) -> float:
        """Microseconds of the way for many rows; not timed twice, nor once time is up."""
        if problem not in self.many_us:
            if self.elapsed() > self.seconds:
                return float("inf")
            self.many_us[problem] = self.bench.us(*astuple(problem), None)
        return self.many_us[problem]


def tune(formats: list[str], shapes: dict, rows: list[int], seconds: float, out: Path) -> None:
    """Searches for `seconds`, and writes the table or adds to it."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=spawn)
    try:
        Search(Bench(2), pool, seconds).run(formats, shapes, rows, out)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
