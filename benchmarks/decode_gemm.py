"""Tunes the Triton linear kernel on this GPU, holds it to float64, and times it beside cuBLAS.

Usage: python benchmarks/decode_gemm.py --out TABLE.json
       [--shapes llama-8b,qwen3-0.6b,qwen3-30b-a3b] [--rows 1 2 4 ...] [--minutes 4]

A product is timed as decoding runs it: kernel after kernel in one CUDA graph, each of which may
start before the one before has ended, over copies of the weight that together are four times the
L2. The search has three rounds: cuts of the weight and depths of the pipeline; TMA and prefetching
for the best; and the best with every epilogue of the shape. The table (see
`rackmount_backends.triton_linear.tuning`) gets a tiling where it beat cuBLAS and was right. The
rule for shapes that are not in a table is timed beside it.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from rackmount_backends.triton_linear import tuning
from rackmount_backends.triton_linear.kernel import linear_kernel
from rackmount_backends.triton_linear.linear import Prepared, TritonLinear, plan
from rackmount_backends.triton_linear.tuning import BUCKETS, Tiling
from rackmount_registry.formats import Weight

PLAIN, GATED, ADDED = ("none",), ("silu_mul", "none"), ("add", "none")
MODELS: dict[str, dict[str, tuple[int, int, tuple[str, ...]]]] = {
    "llama-8b": {
        "gate_up": (28672, 4096, GATED),
        "down": (4096, 14336, ADDED),
        "head": (128256, 4096, PLAIN),
        "qkv": (6144, 4096, PLAIN),
        "o": (4096, 4096, ADDED),
    },
    "qwen3-0.6b": {
        "gate_up": (6144, 1024, GATED),
        "down": (1024, 3072, ADDED),
        "head": (151936, 1024, PLAIN),
        "qkv": (4096, 1024, PLAIN),
        "o": (1024, 2048, ADDED),
    },
    "qwen3-30b-a3b": {
        "head": (151936, 2048, PLAIN),
        "qkv": (5120, 2048, PLAIN),
        "o": (2048, 4096, ADDED),
    },
}
"""Weights [N, K] by name, each with its epilogues: the one that is searched for comes first."""

DTYPE = torch.bfloat16
CEILING = 4.3e12
"""Bytes a second that an H200 was seen to read."""
ROTATED_BYTES = 240 << 20
SHARED_MEMORY = 227 << 10
EPILOGUE_MEMORY = 32 << 10
FEWEST_BYTES_IN_FLIGHT = 40 << 10
"""Of an SM: less cannot hide the memory's latency."""
BETWEEN = (3, 5, 17, 33, 100, 255)
"""Numbers of rows that are checked beside the buckets."""

CUTS: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: (
        (16, 256, 4), (32, 128, 4), (32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4),
        (128, 64, 4), (128, 128, 4), (128, 128, 8),
    ),
    32: ((32, 128, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)),
    64: ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8)),
    128: ((64, 64, 4), (64, 128, 4), (64, 64, 8), (128, 64, 8), (128, 128, 8), (256, 64, 8)),
    256: ((64, 64, 4), (64, 64, 8), (128, 64, 8), (128, 128, 8)),
}  # fmt: skip
"""Tokens a tile -> (block_n, block_k, warps) that are tried."""
ANCHORS = (1, 16, 32, 64, 128, 256)
"""Buckets that are searched; those between take what is best for their neighbours."""


@dataclass(frozen=True)
class Problem:
    n: int
    k: int
    rows: int
    epilogue: str

    @property
    def num_bytes(self) -> int:
        """What must be moved at least."""
        out = self.n // 2 if self.epilogue == "silu_mul" else self.n
        read = self.n * self.k + self.rows * self.k + (self.epilogue == "add") * self.rows * out
        return (read + self.rows * out) * DTYPE.itemsize


Ranking = dict[Tiling, float]
"""Tiling -> microseconds."""


def candidates(problem: Problem, num_sms: int) -> Iterator[Tiling]:
    """First round: cuts of the weight, one to three programs an SM, and how tiles are shared."""
    block_m = tuning.block_m(problem.rows)
    for block_n, block_k, warps in CUTS[block_m]:
        if block_n > problem.n or problem.k % block_k or (block_m > 4 * block_n):
            continue
        seen = set()
        for programs in (1, 2, 3):
            stage = (block_n + block_m) * block_k * DTYPE.itemsize
            spare = SHARED_MEMORY // programs - 1024 - min(block_n * block_m * 4, EPILOGUE_MEMORY)
            stages = min(spare // stage, 8)
            in_flight = (stages - 1) * block_n * block_k * DTYPE.itemsize * programs
            if stages < 3 or in_flight < FEWEST_BYTES_IN_FLIGHT:
                continue
            for share in shares(problem, block_n, block_k, num_sms * programs):
                if (stages, share) not in seen:
                    seen.add((stages, share))
                    yield Tiling(block_n, block_k, share, stages, warps, prefetch=2, tma=False)


def shares(problem: Problem, block_n: int, block_k: int, slots: int) -> Iterator[int]:
    """Blocks a program: as many for each as fill the GPU once; the division of whole tiles that
    leaves the fewest places empty; and whole tiles, where there are enough."""
    blocks = problem.k // block_k
    units = triton.cdiv(problem.n, block_n) * blocks
    least = triton.cdiv(blocks, tuning.MAX_PARTS // 2)
    even = max(triton.cdiv(units, slots), least)
    yield even

    def emptiness(share: int) -> float:
        """Share of the time that the last wave wastes, and what splitting costs."""
        waves = units / share / slots
        return -(-waves // 1) / waves - 1 + 0.02 * blocks / share

    divisors = [share for share in range(least, blocks + 1) if blocks % share == 0]
    yield min(divisors, key=emptiness)
    if 2 * units >= slots * blocks:
        yield blocks


def neighbours(ranking: Ranking) -> Iterator[Tiling]:
    """Second round: the best three by TMA, the best one with other prefetching too."""
    best = sorted(ranking, key=ranking.__getitem__)[:3]
    for tiling in best:
        yield replace(tiling, tma=True)
    for prefetch, tma in itertools.product((0, 1, 4), (False, True)):
        yield replace(best[0], prefetch=prefetch, tma=tma)


class Bench:
    """Weights, activations, and the clock."""

    def __init__(self, problems: list[Problem]) -> None:
        largest = max(problem.n * problem.k for problem in problems)
        size = max(2 * largest, ROTATED_BYTES // DTYPE.itemsize)
        torch.manual_seed(0)
        self.pool = torch.empty(size, dtype=DTYPE, device="cuda").normal_(std=0.02)
        widest = max(max(problem.n, problem.k) for problem in problems)
        self.x = torch.randn(tuning.MAX_ROWS, widest + 64, dtype=DTYPE, device="cuda")
        self.residual = torch.randn(tuning.MAX_ROWS, widest, dtype=DTYPE, device="cuda")

    def weights(self, n: int, k: int) -> list[Tensor]:
        """Copies, no two of which overlap."""
        count = min(triton.cdiv(ROTATED_BYTES, n * k * DTYPE.itemsize), len(self.pool) // (n * k))
        return list(self.pool[: max(2, count) * n * k].view(-1, n, k))

    def call(self, kernel: TritonLinear, prepared: Prepared, rows: int, epilogue: str) -> Tensor:
        n, k = prepared.weight.shape
        x = self.x[:rows, :k]
        if epilogue == "silu_mul":
            return kernel.run_silu_mul(x, prepared, None)
        if epilogue == "add":
            return kernel.run_add(x, prepared, None, self.residual[:rows, :n])
        return kernel.run(x, prepared, None)

    def time(self, problem: Problem, tiling: Tiling | None, samples: int = 3) -> float:
        """Microseconds of a product, one of many in a graph; infinite where it cannot run."""
        kernel = TritonLinear(lambda *_: tiling)
        prepared = [kernel.prepare(dense(w)) for w in self.weights(problem.n, problem.k)]
        calls = prepared * triton.cdiv(8, len(prepared))
        try:
            self.call(kernel, prepared[0], problem.rows, problem.epilogue)
        except OutOfResources:
            return float("inf")
        return graph_us(
            [lambda p=p: self.call(kernel, p, problem.rows, problem.epilogue) for p in calls],
            samples,
        )

    def faults(self, n: int, k: int, epilogue: str, choose: Callable) -> dict[int, float]:
        """Numbers of rows -> relative error against float64, where it is too large, the counters
        are left in disorder or a second run differs."""
        kernel, weight = TritonLinear(choose), self.weights(n, k)[-1]
        prepared = kernel.prepare(dense(weight))
        x = self.x[:, :k].double()
        parts = [x @ rows.double().T for rows in weight.split(16384)]
        wide = torch.cat(parts, 1)
        if epilogue == "silu_mul":
            gate, up = wide.chunk(2, -1)
            wide = torch.nn.functional.silu(gate) * up
        elif epilogue == "add":
            wide += self.residual[:, :n].double()
        found = {}
        for rows in sorted({*BUCKETS, *BETWEEN}):
            out = self.call(kernel, prepared, rows, epilogue)
            again = self.call(kernel, prepared, rows, epilogue)
            error = float((out.double() - wide[:rows]).norm() / wide[:rows].norm())
            worst = float((out.double() - wide[:rows]).abs().max() / wide[:rows].abs().max())
            sound = torch.equal(out, again) and not prepared.arrivals.any()
            if not (sound and error < 5e-3 and worst < 2e-2):
                found[rows] = error
        return found


def dense(weight: Tensor) -> Weight:
    n, k = weight.shape
    return Weight("dense", {"weight": weight}, (n,), k)


def graph_us(calls: list[Callable[[], Any]], samples: int) -> float:
    """Median microseconds of a call, from replays of a graph of all of them."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()  # without the garbage collection of `torch.cuda.graph`
    for call in calls:
        call()
    graph.capture_end()
    graph.replay()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 3 / len(calls))
    return statistics.median(times)


def build(problem: Problem, tiling: Tiling) -> None:
    """Compiles a kernel into Triton's cache on disk; in a process of its own."""
    n, k, rows, meta = problem.n, problem.k, problem.rows, torch.device("meta")
    silu, add = problem.epilogue == "silu_mul", problem.epilogue == "add"
    x, weight = (torch.empty(size, dtype=DTYPE, device=meta) for size in ((rows, k), (n, k)))
    out = torch.empty((rows, n // 2 if silu else n), dtype=DTYPE, device=meta)
    arrivals = torch.empty(n, dtype=torch.int32, device=meta)
    prepared = Prepared(weight, arrivals, {})
    grid, arguments = plan(tiling, x, prepared, None, out if add else None, out, silu)
    early = torch.cuda.get_device_capability() >= (9, 0)
    arguments |= {"COMPILED": True, "PDL": early, "launch_pdl": early}
    linear_kernel.warmup(grid=grid, **arguments)


def key(problem: Problem, tiling: Tiling) -> tuple[Any, ...]:
    """What a compiled kernel depends on."""
    parts = triton.next_power_of_2(tiling.parts(problem.k))
    whole = replace(tiling, share=0)
    block_m, aligned = tuning.block_m(problem.rows), tiling.aligned(problem.k)
    return block_m, whole, parts, aligned, problem.epilogue


def build_all(
    pool: ProcessPoolExecutor, wanted: Iterable[tuple[Problem, Tiling]]
) -> dict[tuple[Any, ...], BaseException | None]:
    """Builds each kernel once, whatever problems share it, and says what failed."""
    pairs = {key(*pair): pair for pair in wanted}
    futures = {name: pool.submit(build, *pair) for name, pair in pairs.items()}
    return {name: future.exception() for name, future in futures.items()}


class Search:
    """The rounds, within a time."""

    def __init__(self, bench: Bench, pool: ProcessPoolExecutor, minutes: float) -> None:
        self.bench, self.pool = bench, pool
        self.start, self.seconds = time.monotonic(), 60 * minutes
        self.rankings: dict[Problem, Ranking] = {}

    def round(self, name: str, wanted: dict[Problem, list[Tiling]], until: float) -> None:
        """Times what is wanted, until that part of the time is over."""
        pairs = [(problem, tiling) for problem, tilings in wanted.items() for tiling in tilings]
        kernels = build_all(self.pool, pairs)
        for failed, error in kernels.items():
            if error is not None:
                print(f"cannot be built: {failed}: {error!r:.200}")
        built, timed = self.elapsed(), 0
        for problem, tiling in pairs:
            if self.elapsed() > until * self.seconds:
                break
            ranking = self.rankings.setdefault(problem, {})
            if tiling not in ranking and kernels[key(problem, tiling)] is None:
                ranking[tiling] = self.bench.time(problem, tiling)
            timed += 1
        print(
            f"{name}: {len(kernels)} kernels built by {built:.0f} s, "
            f"{timed} of {len(pairs)} tilings timed by {self.elapsed():.0f} s",
            flush=True,
        )

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def best(self, problem: Problem, count: int) -> list[Tiling]:
        ranking = self.rankings.get(problem, {})
        usable = [tiling for tiling in ranking if ranking[tiling] < float("inf")]
        return sorted(usable, key=ranking.__getitem__)[:count]

    def run(self, shapes: dict[tuple[int, int], tuple[str, ...]], rows: list[int]) -> None:
        num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        anchors = [r for r in rows if r in ANCHORS] or rows
        searched = [Problem(n, k, r, "none") for r in anchors for n, k in shapes]
        self.round("cuts", {p: list(candidates(p, num_sms)) for p in searched}, 0.5)
        known = [p for p in searched if self.best(p, 1)]
        self.round("neighbours", {p: list(neighbours(self.rankings[p])) for p in known}, 0.7)
        wanted = {}
        for (n, k), epilogues in shapes.items():
            for r, epilogue in itertools.product(rows, epilogues):
                near = [a for a in anchors if tuning.block_m(a) == tuning.block_m(r)]
                good = (t for a in near for t in self.best(Problem(n, k, a, "none"), 3))
                wanted[Problem(n, k, r, epilogue)] = list(dict.fromkeys(good))
        self.round("epilogues", wanted, 0.9)


def tabulate(search: Search, shapes: dict, rows: list[int]) -> dict[str, Any]:
    """The table, of what beat cuBLAS; prints a line for each problem."""
    bench, num_sms = search.bench, torch.cuda.get_device_properties("cuda").multi_processor_count
    table: dict[str, dict[str, list | None]] = {}
    for (n, k), epilogues in shapes.items():
        for epilogue, r in itertools.product(epilogues, rows):
            problem, ruled = Problem(n, k, r, epilogue), tuning.rule(n, k, r, num_sms)
            best = next(iter(search.best(problem, 1)), None)
            us, by_rule = (bench.time(problem, t, 5) if t else float("inf") for t in (best, ruled))
            cublas_us = bench.time(problem, None, 5)
            values = list(asdict(best).values()) if best and us < cublas_us else None
            table.setdefault(f"{n}x{k} {epilogue}", {})[str(r)] = values
            rate = problem.num_bytes / min(us, cublas_us) * 1e6
            print(
                f"{n:>6} x {k:<6}{epilogue:<9}{r:>4} {us:>8.2f} us, cuBLAS {cublas_us:>8.2f} us, "
                f"by rule {by_rule:>8.2f} us: {rate / 1e12:.2f} TB/s {100 * rate / CEILING:5.1f} % "
                f" {values or 'cuBLAS'}"
            )
    return {"fields": [field.name for field in fields(Tiling)], "shapes": table}


def serialize(table: dict) -> str:
    """JSON with a line for each shape."""
    shapes = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table["shapes"].items())
    head = json.dumps({key: value for key, value in table.items() if key != "shapes"})
    return f'{head[:-1]},\n "shapes": {{\n{shapes}\n }}}}\n'


def check(bench: Bench, table: dict, shapes: dict) -> None:
    """Takes out of the table what is wrong, and says so."""
    for (n, k), epilogues in shapes.items():
        for epilogue in epilogues:
            row = tuning.parse(table)[f"{n}x{k} {epilogue}"]
            faults = bench.faults(n, k, epilogue, lambda _, e, b, row=row: row.get(b))
            for rows, error in faults.items():
                bucket = BUCKETS[tuning.bucket_of(rows)]
                print(f"WRONG: {n}x{k} {epilogue} rows {rows}: {error:.2e}, {row.get(bucket)}")
                table["shapes"][f"{n}x{k} {epilogue}"][str(bucket)] = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shapes", default=",".join(MODELS), help="models, comma-separated")
    parser.add_argument("--rows", type=int, nargs="+", choices=BUCKETS, default=list(BUCKETS))
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--out", type=Path, required=True, help="the table")
    args = parser.parse_args()
    models = args.shapes.split(",")
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    shapes = {(n, k): e for model in models for n, k, e in MODELS[model].values()}
    bench = Bench([Problem(n, k, 1, "none") for n, k in shapes])
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        search = Search(bench, pool, args.minutes)
        search.run(shapes, args.rows)
    table = tabulate(search, shapes, args.rows)
    check(bench, table, shapes)
    gpu = torch.cuda.get_device_name()
    about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(serialize(about | table))


if __name__ == "__main__":
    main()
