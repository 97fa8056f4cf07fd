"""Checks the Triton expert kernel on this GPU against float64, times it, and finds its plans.

Usage: python benchmarks/experts.py [--formats dense,fp8_blocks,...] [--tokens 1 4 16 ...]
       [--shape ExHxIxK] [--tune] [--seconds 200] [--out TABLE.json] [--no-check]

A layer is timed as a model runs it: layer after layer in one CUDA graph, each with routes of its
own, over weights that are together far larger than the L2. The floor is what the distinct experts
touched weigh at 4.3 TB/s, or the arithmetic at 791 TFLOP/s where that is more. `--tune` searches
both products apart, for each size of blocks, then times whole layers of the best; it writes the
table that `rackmount_moe.triton_experts.tuning` reads, keeping what it does not measure.
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
import torch.nn.functional as F
import triton
from torch import Tensor

from rackmount_moe.triton_experts import launches, tuning
from rackmount_moe.triton_experts.align import Blocks, align
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.few import sum_kernel
from rackmount_moe.triton_experts.launches import Prepared
from rackmount_moe.triton_experts.packing import CODES, Packed
from rackmount_moe.triton_experts.product import product_kernel
from rackmount_moe.triton_experts.tuning import BUCKETS, Plan, Tiling
from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight

DTYPE = torch.bfloat16
READ, ARITHMETIC = 4.3e12, 791e12
"""Bytes and operations a second that an H200 was seen to do."""
NUM_LAYERS = 4
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)
CHECKED = (0, 1, 2, 3, 7, 8, 9, 16, 64, 256, 1000)
SHARED_MEMORY = 227 << 10
FEWEST_BYTES_IN_FLIGHT = 32 << 10
GROUP = 128
MOST_ERROR = 6e-3
"""Relative to the norm: three roundings to bfloat16, and some to spare."""
INF = float("inf")


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    width: int
    top_k: int


# ---------------------------------------------------------------- weights and inputs


def make_weight(fmt: str, shape: Shape, parts: tuple[int, ...], columns: int) -> Weight:
    """Random, with products of about the size of their input."""
    size, device = (shape.experts, sum(parts), columns), "cuda"
    std = columns**-0.5
    if fmt == "dense":
        weight = torch.empty(size, dtype=DTYPE, device=device).normal_(std=std)
        return Weight(fmt, {"weight": weight}, parts, columns)
    groups = triton.cdiv(columns, GROUP)

    def scales(*dims: int, around: float) -> Tensor:
        return (torch.rand(dims, device=device) + 0.5) * around

    if fmt.startswith("fp8"):
        values = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
        for expert in values:
            expert.copy_(torch.randn(size[1:], device=device) * 50)
        rows = (sum(triton.cdiv(part, 128) for part in parts), groups)
        dims = size[:2] if fmt == "fp8_rows" else (shape.experts, *rows)
        tensors = {"values": values, "scales": scales(*dims, around=std / 50)}
        return Weight(fmt, tensors, parts, columns)
    bits, levels = (4, 16) if fmt == "int4_groups" else (8, 256)
    dims = (shape.experts, sum(parts), groups)
    tensors = {
        "scales": scales(*dims, around=std * 4 / levels).to(DTYPE),
        "zeros": torch.randint(levels // 2 - 1, levels // 2 + 2, dims, device=device).byte(),
    }
    if bits == 4:
        words = (*size[:2], triton.cdiv(columns, 8))
        tensors["values"] = torch.randint(
            -(2**31), 2**31, words, dtype=torch.int64, device=device
        ).to(torch.int32)
    else:
        tensors["values"] = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    return Weight(fmt, tensors, parts, columns, group=GROUP)


def make_bundle(fmt: str, shape: Shape) -> ExpertBundle:
    return ExpertBundle(
        gate_up=make_weight(fmt, shape, (shape.width, shape.width), shape.hidden),
        down=make_weight(fmt, shape, (shape.hidden,), shape.width),
    )


def make_input(shape: Shape, tokens: int, case: str = "uniform") -> ExpertInput:
    """Tokens and their routes. Cases: "uniform"; "one": all to the same experts; "absent": a third
    of the choices, and all of token 0, are of other ranks."""
    scores = torch.rand(tokens, shape.experts, device="cuda")
    if case == "one":
        scores = scores[:1].expand(tokens, -1)
    weights, ids = scores.topk(shape.top_k)
    ids = ids.int()
    if case == "absent":
        ids[torch.rand_like(weights) < 1 / 3] = -1
        ids[:1] = -1
    x = torch.randn(tokens, shape.hidden, device="cuda").to(DTYPE)
    return ExpertInput(x=x, expert_ids=ids, weights=(weights / weights.sum(-1, True)).float())


def defined(given: ExpertInput, bundle: ExpertBundle) -> Tensor:
    """The layer in float64, expert after expert."""
    out = torch.zeros_like(given.x, dtype=torch.float64)
    for expert in given.expert_ids.unique().tolist():
        if expert >= 0:
            tokens, choices = torch.where(given.expert_ids == expert)
            gate_up = bundle.gate_up.expert(expert).dequantize().double()
            gate, up = (given.x[tokens].double() @ gate_up.T).chunk(2, -1)
            y = (F.silu(gate) * up) @ bundle.down.expert(expert).dequantize().double().T
            out.index_add_(0, tokens, y * given.weights[tokens, choices].double()[:, None])
    return out


# ---------------------------------------------------------------- the clock


def graph_us(calls: list[Callable[[], Any]], samples: int = 3) -> float:
    """Median microseconds of a call, from replays of a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for call in calls:
            call()
    finally:
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


class Bench:
    """Layers of one format, and routes for each number of tokens."""

    def __init__(self, fmt: str, shape: Shape) -> None:
        torch.manual_seed(0)
        self.format, self.shape = fmt, shape
        self.bundle = make_bundle(fmt, shape)
        kernel = TritonExperts()
        self.layers = [kernel.prepare(self.bundle)]
        while len(self.layers) < NUM_LAYERS:
            self.layers.append(kernel.prepare(make_bundle(fmt, shape)))
        self.key = f"{fmt} {shape.experts}x{shape.hidden}x{shape.width}"
        self.inputs: dict[int, list[ExpertInput]] = {}

    def given(self, tokens: int) -> list[ExpertInput]:
        if tokens not in self.inputs:
            count = 16 if tokens <= 64 else 8 if tokens <= 1024 else 4
            self.inputs[tokens] = [make_input(self.shape, tokens) for _ in range(count)]
        return self.inputs[tokens]

    def touched(self, tokens: int) -> float:
        """Distinct experts of a layer, on average."""
        given = self.given(tokens)
        return statistics.mean(len(each.expert_ids.unique()) for each in given)

    def num_bytes(self, tokens: int, *packed: Packed) -> float:
        """Weights that must be read at least."""
        tensors = [t for p in packed for t in (p.values, p.scales, p.zeros) if t is not None]
        whole = sum(t.nbytes for t in tensors)
        return whole / self.shape.experts * self.touched(tokens)

    def floor_us(self, tokens: int) -> float:
        slots = tokens * self.shape.top_k
        flops = 6 * slots * self.shape.hidden * self.shape.width
        layer = self.layers[0]
        read = self.num_bytes(tokens, layer.gate_up, layer.down)
        return max(read / READ, flops / ARITHMETIC) * 1e6

    def layer_us(self, tokens: int, plan: Plan | None = None, samples: int = 3) -> float:
        """Of a whole layer, by a plan or by its own."""
        kernel = TritonExperts()
        layers = self.layers
        if plan is not None:
            layers = [replace(each, plans=(plan,) * len(BUCKETS)) for each in layers]
        pairs = zip(self.given(tokens), itertools.cycle(layers), strict=False)
        return guarded([lambda g=g, p=p: kernel.run(g, p) for g, p in pairs], samples)

    def product_us(self, tokens: int, which: str, plan: Plan) -> float:
        """Of one product alone."""
        pairs = zip(self.given(tokens), itertools.cycle(self.layers), strict=False)
        found = [self.launch(given, layer, which, plan) for given, layer in pairs]
        return guarded([lambda k=k, g=g, a=a: k[g](**a) for k, g, a in found])

    def launch(self, given: ExpertInput, layer: Prepared, which: str, plan: Plan) -> tuple:
        blocks = None
        if plan.block_m:
            blocks = align(given.expert_ids, self.shape.experts, plan.block_m)
        return launch(given, layer, which, plan, blocks)


def launch(
    given: ExpertInput, layer: Prepared, which: str, plan: Plan, blocks: Blocks | None
) -> tuple:
    """Kernel, grid and arguments of a product."""
    x, ids = given.x, given.expert_ids

    def new(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), dtype=x.dtype, device=x.device)

    width, hidden = layer.gate_up.rows // 2, layer.down.rows
    act = new(ids.numel(), width)
    if which == "gate_up":
        return product_kernel, *launches.product_launch(
            plan, layer, x, ids, blocks, given.weights, act
        )
    if plan.block_m:
        out = new(ids.numel(), hidden)
        return product_kernel, *launches.product_launch(plan, layer, act, ids, blocks, None, out)
    return sum_kernel, *launches.sum_launch(plan, layer, act, ids, new(len(x), hidden))


def guarded(calls: list[Callable[[], Any]], samples: int = 3) -> float:
    """Infinite, with a word about it, where a kernel cannot run."""
    try:
        return graph_us(calls, samples)
    except Exception as error:  # a tiling that fails must not end the search
        if "illegal" in str(error):
            raise
        print(f"  cannot run: {type(error).__name__} {str(error)[:120]!r}", flush=True)
        return INF


# ---------------------------------------------------------------- compiling ahead


def build(job: tuple) -> None:
    """Compiles a kernel into Triton's cache on disk; in a process of its own."""
    shape, which, plan, packs = job
    meta = torch.device("meta")
    ids = torch.empty((16, shape.top_k), dtype=torch.int32, device=meta)
    given = ExpertInput(
        x=torch.empty((16, shape.hidden), dtype=DTYPE, device=meta),
        expert_ids=ids,
        weights=torch.empty(ids.shape, device=meta),
    )
    blocks = None
    if plan.block_m:
        flat, one = (torch.empty(n, dtype=torch.int32, device=meta) for n in (64, 1))
        blocks = Blocks(flat, flat.new_empty((64, plan.block_m)), one)
    arrivals = torch.empty(1, dtype=torch.int32, device=meta)
    layer = Prepared(packs[0], packs[1], arrivals, ())
    kernel, grid, arguments = launch(given, layer, which, plan, blocks)
    early = torch.cuda.get_device_capability() >= (9, 0)
    arguments |= {"COMPILED": True, "PDL": early, "launch_pdl": early}
    kernel.warmup(grid=grid, **arguments)


def on_meta(packed: Packed) -> Packed:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    return replace(
        packed,
        values=moved(packed.values),
        scales=moved(packed.scales),
        zeros=moved(packed.zeros),
        order=moved(packed.order),
    )


def build_key(which: str, plan: Plan) -> tuple:
    """What a compiled kernel depends on."""
    tiling = plan.gate_up if which == "gate_up" else plan.down
    few = (plan.parts, plan.prefetch) if which == "down" and not plan.block_m else ()
    return which, plan.block_m, replace(tiling, programs=0), few


def build_all(
    pool: ProcessPoolExecutor, bench: Bench, wanted: Iterable[tuple[str, Plan]]
) -> set[tuple]:
    """Builds each kernel once; the keys of those that failed, which it names."""
    packs = (on_meta(bench.layers[0].gate_up), on_meta(bench.layers[0].down))
    pairs = {build_key(*pair): pair for pair in wanted}
    start = time.monotonic()
    futures = {key: pool.submit(build, (bench.shape, *pair, packs)) for key, pair in pairs.items()}
    failed = set()
    for key, future in futures.items():
        error = future.exception()
        if error is not None:
            failed.add(key)
            print(f"  cannot be built: {key}: {type(error).__name__} {str(error)[-160:]!r}")
    print(f"  {len(pairs)} kernels in {time.monotonic() - start:.0f} s", flush=True)
    return failed


# ---------------------------------------------------------------- search


def candidates(bench: Bench, which: str, block_m: int) -> Iterator[Tiling]:
    """Tilings of a product for blocks of so many slots."""
    packed = bench.layers[0].gate_up if which == "gate_up" else bench.layers[0].down
    dense = packed.code == "dense"
    rows = block_m or launches.FEW_BLOCK_M
    if rows >= 64 and dense:
        cuts = ((128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
    elif dense:
        cuts = ((32, 256, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (64, 256, 4))
    else:
        cuts = ((64, 0, 4), (128, 0, 4), (128, 0, 8))
    size = DTYPE.itemsize if dense else 0.5 if packed.code == "int4" else 1
    for block_n, block_k, warps in cuts:
        block_k = block_k or packed.block_k
        weight, inputs = int(block_n * block_k * size), rows * block_k * DTYPE.itemsize
        seen = set()
        for programs in (1, 2, 3, 4):
            # A weight that is unpacked in registers leaves its last stage early.
            spare = SHARED_MEMORY // programs - 2048 + (0 if dense else weight)
            stages = min(spare // (weight + inputs), 8)
            resident = SHARED_MEMORY // (stages * (weight + inputs) + 2048) if stages else 0
            starved = rows < 64 and resident * (stages - 1) * weight < FEWEST_BYTES_IN_FLIGHT
            if stages < 2 or starved or stages in seen:
                continue
            seen.add(stages)
            yield Tiling(block_n, block_k, stages, warps)
            if dense and block_n >= 128 and (rows >= 64 or programs < 3):
                yield Tiling(block_n, block_k, stages, warps, tma=True)


def block_sizes(bench: Bench, tokens: int) -> list[int]:
    """Sizes of blocks worth a try; 0: slot by slot."""
    each = tokens * bench.shape.top_k / bench.shape.experts
    sizes = [0] if tokens <= tuning.MAX_FEW else []
    sizes += [size for size in (16, 32, 64, 128) if size / 4 <= max(4, 2 * each) <= 16 * size]
    return sizes if tokens > 2 else [0]


class Search:
    """Both products apart, then whole layers."""

    def __init__(self, bench: Bench, pool: ProcessPoolExecutor, seconds: float) -> None:
        self.bench, self.pool = bench, pool
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, buckets: list[int]) -> dict[int, tuple[float, Plan]]:
        """Bucket -> the best layer's microseconds and plan."""
        sizes = {tokens: block_sizes(self.bench, tokens) for tokens in buckets}
        plans: dict[tuple[str, int], list[Plan]] = {}
        for size in sorted({size for each in sizes.values() for size in each}):
            for which in ("gate_up", "down"):
                plans[which, size] = [
                    plan
                    for tiling in candidates(self.bench, which, size)
                    for plan in self.variants(which, size, tiling)
                ]
        wanted = [(which, plan) for (which, _), each in plans.items() for plan in each]
        failed = build_all(self.pool, self.bench, wanted)
        best: dict[int, tuple[float, Plan]] = {}
        for index, tokens in enumerate(buckets):
            share = self.left() / (len(buckets) - index)
            found = self.search(tokens, sizes[tokens], plans, failed, time.monotonic() + share)
            if found is not None:
                best[tokens] = found
        return best

    def variants(self, which: str, block_m: int, tiling: Tiling) -> Iterator[Plan]:
        """Plans that differ in what is asked of one product."""
        if which == "gate_up" or block_m:
            yield Plan(tiling, tiling, block_m)
            return
        if tiling.tma:
            return
        for parts in (1, 2, 4, 8):
            yield Plan(tiling, tiling, block_m, parts, prefetch=2)

    def search(
        self,
        tokens: int,
        sizes: list[int],
        plans: dict[tuple[str, int], list[Plan]],
        failed: set[tuple],
        until: float,
    ) -> tuple[float, Plan] | None:
        bench, finalists = self.bench, []
        for position, size in enumerate(sizes):
            stop = time.monotonic() + 0.8 * (until - time.monotonic()) / (len(sizes) - position)
            ranked = {}
            for which in ("gate_up", "down"):
                times = {}
                legal = [p for p in plans[which, size] if build_key(which, p) not in failed]
                middle = time.monotonic() + (stop - time.monotonic()) / (
                    2 if which == "gate_up" else 1
                )
                for plan in legal:
                    if times and time.monotonic() > middle:
                        break
                    times[plan] = bench.product_us(tokens, which, plan)
                ranked[which] = sorted(times, key=times.__getitem__)[:3]
                packed = bench.layers[0].gate_up if which == "gate_up" else bench.layers[0].down
                rate = bench.num_bytes(tokens, packed) / 1e6
                shown = ", ".join(
                    f"{times[p]:.1f} us {rate / times[p]:.2f} TB/s {brief(which, p)}"
                    for p in ranked[which]
                )
                print(
                    f"  {tokens:>5} tokens, blocks of {size:>3}, {which:<7} "
                    f"({len(times)} of {len(legal)} tried): {shown}",
                    flush=True,
                )
            for first, second in itertools.product(ranked["gate_up"][:2], ranked["down"][:2]):
                finalists.append(replace(second, gate_up=first.gate_up, block_m=size))
        times = {}
        for plan in finalists:
            times[plan] = bench.layer_us(tokens, plan)
        order = sorted(times, key=times.__getitem__)
        if not order or times[order[0]] == INF:
            return None
        extra = list(neighbours(bench, order[0]))
        for plan in extra:
            if time.monotonic() < until + 2:
                times[plan] = bench.layer_us(tokens, plan)
        best = min(times, key=times.__getitem__)
        return times[best], best


def neighbours(bench: Bench, plan: Plan) -> Iterator[Plan]:
    """What differs from a good plan in one respect that costs no new search."""
    if not plan.block_m:
        for prefetch in (0, 1, 4):
            yield replace(plan, prefetch=prefetch)
        return
    for programs in (1, 2, 3, 4):
        yield replace(plan, gate_up=replace(plan.gate_up, programs=programs))
        yield replace(
            plan,
            gate_up=replace(plan.gate_up, programs=programs),
            down=replace(plan.down, programs=programs),
        )


def brief(which: str, plan: Plan) -> str:
    tiling = plan.gate_up if which == "gate_up" else plan.down
    text = f"[{tiling.block_n} {tiling.block_k} s{tiling.stages} w{tiling.warps}"
    text += f" p{tiling.programs}" if tiling.programs else ""
    text += " tma" if tiling.tma else ""
    if which == "down" and not plan.block_m:
        text += f" parts {plan.parts} ahead {plan.prefetch}"
    return text + "]"


# ---------------------------------------------------------------- check and report


Case = tuple[str, Plan | None, tuple[int, ...]]
"""Name, plan (None: the layer's own) and numbers of tokens of a check."""


def check(bench: Bench, cases: Iterable[Case]) -> None:
    """Whole layers against float64 and against themselves; says what is wrong."""
    for name, plan, counts in cases:
        layer, worst, faults = bench.layers[0], 0.0, []
        if plan is not None:
            layer = replace(layer, plans=(plan,) * len(BUCKETS))
        for tokens, case in itertools.product(counts, ("uniform", "one", "absent")):
            try:
                given = make_input(bench.shape, tokens, case)
                error = fault(TritonExperts(), given, layer, bench.bundle)
            except Exception as problem:  # one that cannot run must not hide the others
                if "illegal" in str(problem):
                    raise
                faults.append(f"{tokens} {case}: {type(problem).__name__} {str(problem)[:200]!r}")
                continue
            worst = max(worst, error)
            if not error < MOST_ERROR:
                faults.append(f"{tokens} {case}: error {error:.1e}")
        verdict = f"WRONG: {len(faults)}, {faults[:6]}" if faults else "right"
        print(f"  check {bench.format} {name}: largest error {worst:.1e}, {verdict}", flush=True)


def fault(
    kernel: TritonExperts, given: ExpertInput, layer: Prepared, bundle: ExpertBundle
) -> float:
    """Error relative to the norm; infinite where two runs differ or counters are left behind."""
    out, again = kernel.run(given, layer), kernel.run(given, layer)
    if not torch.equal(out, again) or bool(layer.arrivals.any()):
        return INF
    if not len(out):
        return 0.0
    wide = defined(given, bundle)
    norm = wide.norm()
    return float((out.double() - wide).norm() / norm) if norm else float(out.abs().max())


def report(bench: Bench, tokens: int, plan: Plan) -> None:
    """A line of what a layer takes, and its parts."""
    layer = bench.layers[0]
    us, floor = bench.layer_us(tokens, plan, 5), bench.floor_us(tokens)
    gate_up, down = (bench.product_us(tokens, which, plan) for which in ("gate_up", "down"))
    read = bench.num_bytes(tokens, layer.gate_up, layer.down)
    rates = [
        bench.num_bytes(tokens, packed) / alone / 1e6
        for packed, alone in ((layer.gate_up, gate_up), (layer.down, down))
    ]
    flops = 6 * tokens * bench.shape.top_k * bench.shape.hidden * bench.shape.width
    print(
        f"{bench.format:<12}{tokens:>6} tokens {us:>8.1f} us, floor {floor:>7.1f} = "
        f"{100 * floor / us:3.0f} %, {bench.touched(tokens):5.1f} experts, "
        f"{read / us / 1e6:.2f} TB/s, {flops / us / 1e6:.0f} TFLOP/s; "
        f"gate_up {gate_up:.1f} us {rates[0]:.2f} TB/s {brief('gate_up', plan)}, "
        f"down {down:.1f} us {rates[1]:.2f} TB/s {brief('down', plan)}, "
        f"rest {us - gate_up - down:.1f} us, blocks of {plan.block_m}",
        flush=True,
    )


def tabulated(plan: Plan) -> list:
    tilings = (list(asdict(tiling).values()) for tiling in (plan.gate_up, plan.down))
    return [plan.block_m, plan.parts, plan.prefetch, *tilings]


def serialize(table: dict) -> str:
    """JSON with a line for each shape and bucket."""
    shapes = []
    for shape, row in table["shapes"].items():
        lines = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in row.items())
        shapes.append(f"  {json.dumps(shape)}: {{\n{lines}}}")
    head = json.dumps({key: value for key, value in table.items() if key != "shapes"})
    body = ",\n".join(shapes)
    return f'{head[:-1]},\n "shapes": {{\n{body}}}}}\n'


def shipped(gpu: str) -> dict:
    file = Path(tuning.__file__).parent / "tuned" / f"{gpu.replace(' ', '_')}.json"
    return json.loads(file.read_text()) if file.is_file() else {"shapes": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--formats", default="dense", help=f"of {', '.join(CODES)}")
    parser.add_argument("--tokens", type=int, nargs="+", choices=BUCKETS, default=list(TOKENS))
    parser.add_argument(
        "--shape", default="128x2048x768x8", help="experts x hidden x width x top_k"
    )
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--seconds", type=float, default=200, help="of the search, all formats")
    parser.add_argument("--out", type=Path, help="the table")
    args = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    shape = Shape(*map(int, args.shape.split("x")))
    formats = args.formats.split(",")
    gpu = torch.cuda.get_device_name()
    table = shipped(gpu) | {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    table["fields"] = [field.name for field in fields(Tiling)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        for fmt in formats:
            start = time.monotonic()
            bench = Bench(fmt, shape)
            torch.cuda.synchronize()
            print(
                f"{fmt}: {NUM_LAYERS} layers made in {time.monotonic() - start:.0f} s", flush=True
            )
            packs = bench.layers[0].gate_up, bench.layers[0].down
            buckets = [BUCKETS[tuning.bucket_of(max(1, tokens))] for tokens in CHECKED]
            plans = {tokens: tuning.choose(*packs, tokens) for tokens in args.tokens}
            wanted = [*plans.values(), *(tuning.choose(*packs, bucket) for bucket in buckets)]
            build_all(pool, bench, itertools.product(("gate_up", "down"), wanted))
            if not args.no_check:
                check(bench, [("as chosen", None, CHECKED)])
            if args.tune:
                found = Search(bench, pool, args.seconds / len(formats)).run(args.tokens)
                plans |= {tokens: plan for tokens, (_, plan) in found.items()}
                row = table["shapes"].setdefault(bench.key, {})
                row |= {str(tokens): tabulated(plan) for tokens, plan in plans.items()}
                if args.out:
                    args.out.write_text(serialize(table))
                near = {t: (t, t - t // 3) for t in plans}
                check(bench, [(f"plan for {t}", plan, near[t]) for t, plan in plans.items()])
            for tokens, plan in plans.items():
                report(bench, tokens, plan)
            del bench
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
