"""Checks the Triton expert kernel on this GPU against float64, times it, and finds its plans.

Usage: python benchmarks/experts.py [--formats dense,fp8_blocks,...] [--tokens 1 4 16 ...]
       [--shape ExHxIxK] [--tune] [--seconds 200] [--out TABLE.json] [--no-check]

Layers are those of `expert_layers`. The floor is what the distinct experts touched weigh at 4.3
TB/s, or the arithmetic at 791 TFLOP/s where that is more. `--tune` searches as `rackmount bench
kernels --tune` does, for shapes of any model or none, and holds what it finds against float64.
"""

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from expert_layers import Bench, Shape, defined, make_input

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.launches import Prepared
from rackmount_moe.triton_experts.packing import CODES
from rackmount_moe.triton_experts.table import BUCKETS, Plan
from rackmount_moe.triton_experts.timing import PRODUCTS
from rackmount_moe.triton_experts.tune import (
    Gpu,
    Search,
    brief,
    building,
    known_table,
    versions,
)
from rackmount_registry.experts import ExpertBundle, ExpertInput

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)
CHECKED = (0, 1, 2, 3, 7, 8, 9, 16, 64, 256, 1000)
INF = float("inf")
MOST_ERROR = 6e-3
"""Relative to the norm: three roundings to bfloat16, and some to spare."""


Case = tuple[str, Plan | None, tuple[int, ...]]
"""Name, plan (None: the layer's own) and numbers of tokens of a check."""


def check(bench: Bench, cases: Iterable[Case]) -> None:
    """Whole layers against float64 and against themselves; says what is wrong."""
    for name, plan, counts in cases:
        layer, worst, faults = bench.timed.layers[0], 0.0, []
        if plan is not None:
            layer = replace(layer, plans=(plan,) * len(BUCKETS))
        for tokens, case in itertools.product(counts, ("uniform", "one", "absent")):
            try:
                given = make_input(bench.shape, tokens, case)
                error = fault(TritonExperts(), given, layer, bench.bundle)
            except Exception as problem:  # one that cannot run must not hide the others
                bench.timed.check_context()
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
    timed, layer = bench.timed, bench.timed.layers[0]
    us, floor = timed.layer_us(tokens, plan, 5), bench.floor_us(tokens)
    gate_up, down = (timed.product_us(tokens, which, plan) for which in PRODUCTS)
    read = timed.num_bytes(tokens, layer.gate_up, layer.down)
    rates = [
        timed.num_bytes(tokens, packed) / alone / 1e6
        for packed, alone in ((layer.gate_up, gate_up), (layer.down, down))
    ]
    flops = 6 * tokens * bench.shape.top_k * bench.shape.hidden * bench.shape.width
    print(
        f"{bench.format:<12}{tokens:>6} tokens {us:>8.1f} us, floor {floor:>7.1f} = "
        f"{100 * floor / us:3.0f} %, {timed.touched(tokens):5.1f} experts, "
        f"{read / us / 1e6:.2f} TB/s, {flops / us / 1e6:.0f} TFLOP/s; "
        f"gate_up {gate_up:.1f} us {rates[0]:.2f} TB/s {brief('gate_up', plan)}, "
        f"down {down:.1f} us {rates[1]:.2f} TB/s {brief('down', plan)}, "
        f"rest {us - gate_up - down:.1f} us, blocks of {plan.block_m}",
        flush=True,
    )


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
    parser.add_argument("--out", type=Path, help="a table that what is found is added to")
    args = parser.parse_args()
    formats = args.formats.split(",")
    if args.tune and args.out:
        known_table(args.out, versions())  # refused before the search, not after it
    for fmt in formats:
        bench = Bench(fmt, Shape(*map(int, args.shape.split("x"))), args.tokens)
        layer, given = bench.timed.layers[0], bench.timed.inputs[args.tokens[0]][0]
        packs = layer.gate_up, layer.down
        plans = {tokens: tuning.choose(*packs, tokens) for tokens in args.tokens}
        with building(layer, given, print) as build:
            buckets = [BUCKETS[tuning.bucket_of(max(1, tokens))] for tokens in CHECKED]
            wanted = [*plans.values(), *(tuning.choose(*packs, bucket) for bucket in buckets)]
            build(itertools.product(PRODUCTS, wanted))
            if not args.no_check:
                check(bench, [("as chosen", None, CHECKED)])
            if args.tune:
                search = Search(bench.timed, build, Gpu.current(), print)
                found = search.run(args.seconds / len(formats))
                plans |= found
                if args.out:
                    known = known_table(args.out, versions())
                    args.out.write_text(known.extended(tuning.shape_of(*packs), found).text())
                near = {t: (t, t - t // 3) for t in plans}
                check(bench, [(f"plan for {t}", plan, near[t]) for t, plan in plans.items()])
        for tokens, plan in plans.items():
            report(bench, tokens, plan)
        del bench, layer, given, packs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
