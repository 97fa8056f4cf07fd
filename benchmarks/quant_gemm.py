"""Holds the kernels for quantized weights to float64 on this GPU, times them, and tunes them.

Usage: python benchmarks/quant_gemm.py check|time|many|tune [--formats int4,fp8,...]
       [--shapes llama-8b,...] [--rows 1 8 16 ...] [--seconds 240] [--out TABLE.json]

- check: every format, odd sizes too, at numbers of rows from 0 to 1000, in each way that the kernel
  has; prints the relative errors that are too large, and the largest for each format.
- time: products of few rows as `tuning.choose` cuts them, beside the way for many rows.
- many: products of many rows and what they consist of, beside bfloat16's.
- tune: searches tilings and writes the table `quant/rackmount_quant/kernels/tuned/NAME.json`.

A product is timed as decoding runs it: kernel after kernel in one CUDA graph, each of which may
start before the one before has ended, over copies of the weight that together are more than four
times the L2.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from decode_gemm import CEILING, MODELS, graph_us
from quant_tune import tune, values_of
from quant_weights import (
    DTYPE,
    FORMATS,
    Bench,
    blocks,
    bytes_of,
    call,
    floats,
    forced,
    integers,
    integers8,
    kernel_of,
    residual_of,
    rows8,
)
from torch import Tensor

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.linear import Prepared
from rackmount_quant.kernels.many_rows import dequantize
from rackmount_quant.kernels.rounded_linear import RoundedProduct
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_quant.kernels.tuning import BUCKETS, AnyTiling, HeldTiling, RowTiling, Tiling
from rackmount_registry.formats import EPILOGUES, Weight

ROWS = (0, 1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 128, 256, 1000)
BOUNDS = {
    "few": 5e-3,
    "row": 5e-3,
    "row, in a loop": 5e-3,
    "held": 5e-3,
    "many": 1e-2,
    "rounded": 0.1,
    "few rounded": 0.1,
}
"""Relative errors that rounding explains: of the product; of the weight, too; of the input."""

CHECKED = Tiling(64, 128, 3, stages=4, warps=4, prefetch=2, registers=None)
"""How few rounded rows are checked: with blocks of two tiles in a program, and shared tiles."""
CHECKED_ROWS = {"row": RowTiling(16, 32, 4), "row, in a loop": RowTiling(8, 2, 2)}
"""How one row is checked: with all columns at once, and step by step."""

ODD: dict[str, Callable[[], Weight]] = {
    "int4 uneven": lambda: integers(1024, 2560, 128, zeros=True),
    "int4 two steps": lambda: integers(1024, 4096, 128),
    "int4 act-order": lambda: integers(256, 512, 128, zeros=True, order=True),
    "int4 odd group": lambda: integers(96, 480, 48),
    "int4 short rows": lambda: integers(200, 456, 64),
    "int4 32 zeros": lambda: integers(1000, 1056, 32, zeros=True),
    "int4 rows zeros": lambda: integers(130, 1000, 1000, zeros=True),
    "int8-groups short": lambda: integers8(72, 456, 64),
    "fp8 static": lambda: floats(512, 1024, "tensor"),
    "fp8 plain": lambda: floats(514, 1000, "plain"),
    "fp8-blocks plain": lambda: blocks(1000, 1000, "plain"),
    "fp8-blocks parts": lambda: blocks(1000, 1024, "group", (100, 900)),
    "fp8-blocks one": lambda: blocks(512, 1024),
    "int8 plain": lambda: rows8(34, 72, "plain"),
    "int8 token": lambda: rows8(1024, 1024),
}
"""Sizes that fill nothing, and schemes of their own."""

KINDS: dict[type, str] = {RowTiling: "row", HeldTiling: "held"}
"""How times of tilings are told, but for those of few rows."""


def check() -> None:
    """Prints what is further from float64 than rounding explains."""
    cases = {name: (lambda f=f: f.make(768, 1024)) for name, f in FORMATS.items()} | ODD
    for name, make in cases.items():
        weight = make()
        kernel, worst = kernel_of(weight), dict.fromkeys(BOUNDS, 0.0)
        prepared, dense = kernel.prepare(weight), weight.dequantize().double()
        start = time.monotonic()
        for rows, epilogue in itertools.product(ROWS, ("none", *EPILOGUES)):
            x = torch.randn(rows, weight.in_features + 8, dtype=DTYPE, device="cuda")[:, 8:]
            wide = x.double() @ dense.T
            if epilogue == "silu_mul":
                gate, up = wide.chunk(2, -1)
                wide = F.silu(gate) * up
            elif epilogue == "add":
                wide = wide + residual_of(rows, prepared.packed.n).double()
            for way, chosen in ways_of(prepared, epilogue, rows).items():
                try:
                    out = call(kernel, chosen, x, epilogue)
                    torch.cuda.synchronize()
                except Exception as error:  # told, and the next one is tried
                    print(f"FAILED: {name} {way} rows {rows} {epilogue}: {error!r:.300}")
                    continue
                if rows == 0:
                    assert out.shape == wide.shape
                    continue
                error = float((out.double() - wide).norm() / wide.norm())
                worst[way] = max(worst[way], error)
                if not error < BOUNDS[way] or prepared.arrivals.any():
                    print(f"WRONG: {name} {way} rows {rows} {epilogue}: {error:.2e}")
        told = ", ".join(f"{way} {error:.1e}" for way, error in worst.items() if error > 0)
        print(f"{name:<20} {told}; {time.monotonic() - start:.1f} s", flush=True)


def ways_of(prepared: Prepared, epilogue: str, rows: int) -> dict[str, Prepared]:
    """All that the kernel has for so many rows, by their names in `BOUNDS`."""
    if prepared.many is None:
        ways = {"few": prepared, "many": forced(prepared, None)}
    else:
        ways = {
            "few": replace(prepared, many=None),
            "rounded": forced(prepared, None, rounded=True),
        }
        if 0 < rows <= tuning.MAX_ROWS:
            ways["few rounded"] = forced(prepared, CHECKED, rounded=True)
    if prepared.tiling(epilogue, rows) is None:
        del ways["few"]
    if rows == 1 and tuning.block_k_of(prepared.packed) is not None:
        exact = replace(prepared, many=None)
        ways |= {way: forced(exact, tiling) for way, tiling in CHECKED_ROWS.items()}
    if 0 < rows <= tuning.HELD_ROWS and HeldTiling().takes(prepared.packed):
        ways["held"] = forced(prepared, HeldTiling())
    return ways


def show_times(formats: list[str], shapes: dict, rows: list[int]) -> None:
    bench = Bench(5)
    for form, (name, (n, k, epilogues)) in itertools.product(formats, shapes.items()):
        first = bench.copies(form, n, k)[0]
        for r in rows:
            choose = tuning.choose_rounded if FORMATS[form].rounded else tuning.choose
            way = choose(first.packed, epilogues[0], BUCKETS[tuning.bucket_of(r)])
            tiling = way if isinstance(way, AnyTiling) else None
            few = bench.us(form, n, k, r, epilogues[0], tiling) if tiling else float("inf")
            many = bench.us(form, n, k, r, epilogues[0], None)
            rate = bytes_of(first) / few * 1e6
            kind = KINDS.get(type(tiling), "few")
            print(
                f"{form:<12}{name:<22}{n:>6} x {k:<6}{epilogues[0]:<9}{r:>4} {kind} {few:>7.2f} us "
                f"{rate / 1e12:.2f} TB/s {100 * rate / CEILING:5.1f} %, many {many:>7.2f} us "
                f"{tiling and values_of(tiling)}",
                flush=True,
            )


def show_many(formats: list[str], shapes: dict, rows: list[int]) -> None:
    bench = Bench()
    for name, (n, k, epilogues) in shapes.items():
        for r in rows:
            x = torch.randn(r, k, dtype=DTYPE, device="cuda")
            weight = torch.randn(n, k, dtype=DTYPE, device="cuda") / k**0.5
            us = graph_us([partial(F.linear, x, weight)] * 4, 3)
            print(f"{name:<22}{n:>6} x {k:<6}{r:>6} bf16 {us:>8.1f} us {_rate(r, n, k, us)}")
            for form in formats:
                prepared = bench.copies(form, n, k)[0]
                us = bench.us(form, n, k, r, epilogues[0], None)
                parts = graph_us([partial(dequantize, prepared.packed, DTYPE)] * 4, 3)
                text = f"{_rate(r, n, k, us)}, dequantize {parts:.1f} us"
                if prepared.many is not None:
                    rounding: Rounding = prepared.many.rounding
                    run, rounded = FORMATS[form].kernel().run, rounding.round(x)
                    passes = graph_us([partial(rounding.round, x)] * 4, 3)
                    alone = graph_us([partial(run, rounded, prepared, None)] * 4, 3)
                    error = sum_error(run, prepared, rounded)
                    text += f", round {passes:.1f} us, alone {alone:.1f} us "
                    text += f"{_rate(r, n, k, alone)}, off by {error:.1e}"
                print(f"{'':<8}{form:<12}{epilogues[0]:<9} {us:>8.1f} us {text}", flush=True)


def sum_error(run: Callable[..., Tensor], prepared: Prepared, rounded: RoundedRows) -> float:
    """Relative error of the product of rounded rows against float64: what it adds up with, and the
    rounding of the result to 16 bits, some 1.7e-3."""
    product: RoundedProduct = prepared.many
    rows, some = slice(0, 64), slice(0, 1024)

    def spread(scales: Tensor, like: Tensor) -> Tensor:
        for axis, size in enumerate(like.shape):
            scales = scales.repeat_interleave(-(-size // scales.shape[axis]), axis)
            scales = scales.narrow(axis, 0, size)
        return like.double() * scales

    x = spread(rounded.scales, rounded.values)[rows]
    groups = -(-prepared.packed.k // 128) if prepared.packed.group else 1
    scales = product.scales.view(1, -1) if product.scales.dim() == 1 else product.scales[:groups]
    weight = spread(scales, product.values)[:, some]
    out = run(rounded, prepared, None)[rows, some].double()
    return float((out - x @ weight).norm() / (x @ weight).norm())


def _rate(rows: int, n: int, k: int, us: float) -> str:
    return f"{2 * rows * n * k / us / 1e6:.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("check", "time", "many", "tune"))
    parser.add_argument("--formats", default="int4,fp8", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--shapes", default="llama-8b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path, help="the table")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    formats = args.formats.split(",")
    shapes = {
        f"{model} {name}": shape
        for model in args.shapes.split(",")
        for name, shape in MODELS[model].items()
        if name != "head"
    }
    if args.what == "check":
        check()
    elif args.what == "time":
        show_times(formats, shapes, args.rows)
    elif args.what == "many":
        show_many(formats, shapes, args.rows)
    else:
        tune(formats, shapes, args.rows, args.seconds, args.out)


if __name__ == "__main__":
    main()
