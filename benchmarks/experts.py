"""Checks the Triton expert kernel on this GPU against float64, times it, and finds its plans.

Usage: python benchmarks/experts.py [--formats dense,fp8_blocks,...] [--tokens 1 4 16 ...]
       [--shape ExHxIxK] [--tune] [--seconds 200] [--out TABLE.json] [--no-check]

Layers are those of `expert_layers`. The floor is what the distinct experts touched weigh at 4.3
TB/s, or the arithmetic at 791 TFLOP/s where that is more. `--tune` searches both products apart,
for each size of blocks, then times whole layers of the best; it writes the table that
`rackmount_moe.triton_experts.tuning` reads, keeping what it does not measure.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import triton
from expert_layers import (
    DTYPE,
    INF,
    NUM_LAYERS,
    Bench,
    Shape,
    defined,
    itemsize,
    launch,
    make_input,
)
from torch import Tensor

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.align import Blocks
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.launches import Prepared
from rackmount_moe.triton_experts.packing import CODES, Packed
from rackmount_moe.triton_experts.tuning import BUCKETS, Plan, Tiling
from rackmount_registry.experts import ExpertBundle, ExpertInput

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)
CHECKED = (0, 1, 2, 3, 7, 8, 9, 16, 64, 256, 1000)
SHARED_MEMORY = 227 << 10
FEWEST_BYTES_IN_FLIGHT = 32 << 10
MOST_ERROR = 6e-3
"""Relative to the norm: three roundings to bfloat16, and some to spare."""


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
    layer = Prepared(*packs, ())
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
    return which, plan.block_m, plan.prefetch, replace(tiling, programs=0)


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


def candidates(bench: Bench, which: str, block_m: int) -> Iterator[Tiling]:
    """Tilings of a product for blocks of so many slots, or without blocks."""
    packed = bench.layers[0].gate_up if which == "gate_up" else bench.layers[0].down
    dense = packed.code == "dense"
    if not block_m:
        yield from vector_candidates(bench, which, packed)
        return
    if block_m >= 64 and dense:
        cuts = ((128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
    elif dense:
        cuts = ((32, 256, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (64, 256, 4))
    elif block_m >= 64:
        cuts = ((64, 0, 4), (128, 0, 8))
    else:
        cuts = ((64, 0, 4), (128, 0, 4), (128, 0, 8))
    size = itemsize(packed)
    for block_n, block_k, warps in cuts:
        block_k = block_k or packed.block_k
        weight, inputs = int(block_n * block_k * size), block_m * block_k * DTYPE.itemsize
        seen = set()
        for programs in (1, 2, 3, 4, 6):
            # A weight that is unpacked in registers leaves its last stage early.
            spare = SHARED_MEMORY // programs - 2048 + (0 if dense else weight)
            stages = min(spare // (weight + inputs), 8)
            resident = SHARED_MEMORY // (stages * (weight + inputs) + 2048) if stages else 0
            starved = block_m < 64 and resident * (stages - 1) * weight < FEWEST_BYTES_IN_FLIGHT
            if stages < 2 or starved or stages in seen:
                continue
            seen.add(stages)
            yield Tiling(block_n, block_k, stages, warps)
            if dense and block_n >= 128 and (block_m >= 64 or programs < 3):
                yield Tiling(block_n, block_k, stages, warps, tma=True)


def vector_candidates(bench: Bench, which: str, packed: Packed) -> Iterator[Tiling]:
    """Tilings without blocks: 16 to 128 bytes a thread are read at a time."""
    choices = 1 if which == "gate_up" else bench.shape.top_k
    for block_n, block_k, warps in itertools.product(
        (4, 8, 16, 32), (128, 256, 512, 1024), (2, 4, 8)
    ):
        size = block_n * block_k * choices * itemsize(packed) / (32 * warps)
        whole = not packed.block_k or block_k % packed.block_k == 0
        if whole and 32 <= size <= 128 and packed.columns % block_k == 0:
            yield Tiling(block_n, block_k, 2, warps)


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
                    Plan(tiling, tiling, size) for tiling in candidates(self.bench, which, size)
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
                random.Random(0).shuffle(legal)  # what there is time for is of all kinds
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
        for prefetch in (64, 128, 256):
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
    text += f" prefetch {plan.prefetch}" if which == "gate_up" and plan.prefetch else ""
    return text + "]"


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
    """Error relative to the norm; infinite where two runs differ."""
    out, again = kernel.run(given, layer), kernel.run(given, layer)
    if not torch.equal(out, again):
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
    return [plan.block_m, plan.prefetch, *tilings]


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
    parser.add_argument("--seconds", type=float, default=200, help="of the search, for all formats")
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
