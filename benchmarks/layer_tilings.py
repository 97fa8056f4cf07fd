"""Times tilings of quantized products where they stand: in a layer of Llama 3.1 8B that decodes.

Usage: python benchmarks/layer_tilings.py [--format int4] [--rows 1 8 16 64] [--context 1088]
       [--cut gate_up:64,32,2 ...] [--stages 3 4 6] [--prefetch 0 1 2 4]

Alone, a product starts while another of its kind ends. In a layer it follows a norm, attention or a
product of another shape, and tilings that are as fast alone are not there: registers and blocks
called ahead decide how early the next kernel's programs find room. Layers are norm, qkv, rotary,
attention, o, norm, gate_up and down, one after another in one CUDA graph, with as many copies of
the weights as layers. From the tilings of the table on, one product after the other takes the best
of its own with other bounds of registers, depths of the pipeline and blocks called ahead; and,
where cuts are named (weight rows a tile, blocks a program, warps), of those with the same; of up to
eight rows also those that hold their tokens.

The pipeline's shared memory decides how many programs an SM can hold, too. Where that is more than
its share, those that come while the kernel before ends may crowd on the SMs that are free first
(`rackmount_registry.device.launch`): then a deeper pipeline would keep them
apart.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from attention import LLAMA, Step, context_of, decoding
from decode_gemm import MODELS
from quant_tune import Problem, build, held_candidates, key, on_meta, values_of
from quant_weights import DTYPE, FORMATS, forced
from torch import Tensor

from rackmount_backends.plugin import attention_backends
from rackmount_backends.triton_ops.op_set import TRITON_OPS
from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.tuning import AnyTiling, Tiling
from rackmount_registry.offers import import_attribute

LAYERS = 4
BLOCK_SIZE = 16
ROUNDS = 7
PREFETCH = [0, 1, 2, 4]
STAGES = [3, 4, 6]
REGISTERS: Mapping[int, tuple[int | None, ...]] = {
    2: (None, 128),
    4: (None, 128, 144, 152, 168),
    8: (None, 128),
}
"""By warps of a program."""
ORDER = ("gate_up", "down", "qkv", "o")
SHAPES = {name: MODELS["llama-8b"][name] for name in ORDER}
HIDDEN = LLAMA.num_heads * LLAMA.head_size
HEADS = (LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.num_kv_heads)

Tilings = dict[str, AnyTiling | None]
Cuts = Mapping[str, list[tuple[int, int, int]]]
"""Product -> block_n, share and warps."""
Depths = tuple[list[int], list[int]]
"""Of the pipeline, and blocks called ahead, that are tried."""


class Layers:
    """Weights of some layers, and the clock over them."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.kernel = FORMATS[form].kernel(lambda *_: None)
        make = FORMATS[form].make
        self.weights = {
            name: [self.kernel.prepare(make(n, k)) for _ in range(LAYERS)]
            for name, (n, k, _) in SHAPES.items()
        }
        self.norm = torch.ones(HIDDEN, dtype=DTYPE, device="cuda")

    def load(self, rows: int, context: int) -> None:
        """Times steps of so many requests from here on, each with as many tokens."""
        load = decoding(LLAMA, *[context] * rows)
        descriptor = next(each for each in attention_backends() if each.name == "triton")
        factory = import_attribute(descriptor.factory, "triton")
        self.step = Step(load, factory(context_of(load, BLOCK_SIZE, DTYPE)), BLOCK_SIZE, DTYPE)
        self.plan = self.step.backend.plan(self.step.batch)
        self.x = torch.randn(rows, HIDDEN, dtype=DTYPE, device="cuda")
        self.positions = torch.full((rows,), context - 1, device="cuda")
        block, offset = divmod(context - 1, BLOCK_SIZE)
        blocks = self.step.batch.block_table[:, block]
        self.slots = torch.from_numpy(blocks * BLOCK_SIZE + offset).to("cuda")
        self.angles = torch.rand(context, 2, LLAMA.head_size // 2, device="cuda")

    def tuned(self, rows: int) -> Tilings:
        bucket = tuning.BUCKETS[tuning.bucket_of(rows)]
        return {
            name: tuning.choose(self.weights[name][0].packed, epilogues[0], bucket)
            for name, (_, _, epilogues) in SHAPES.items()
        }

    def us(self, tilings: Tilings) -> float:
        """Microseconds of a layer."""
        forms = {
            name: [forced(each, tilings[name]) for each in weights]
            for name, weights in self.weights.items()
        }

        def layer(index: int, x: Tensor) -> Tensor:
            weights = {name: each[index % LAYERS] for name, each in forms.items()}
            _, cache = self.step.layers[index % len(self.step.layers)]
            run = self.kernel
            qkv = run.run(TRITON_OPS.rms_norm(x, self.norm, 1e-5), weights["qkv"], None)
            q, k, v = qkv.unflatten(1, (-1, LLAMA.head_size)).split(HEADS, 1)
            q = TRITON_OPS.rotary_write(
                q, k, v, self.positions, self.angles, None, None, 1e-5, False, cache, self.slots
            )
            mixed = self.step.backend.run(q, cache, self.plan, LLAMA, None).flatten(1)
            x = run.run_add(mixed, weights["o"], None, x)
            gated = run.run_silu_mul(
                TRITON_OPS.rms_norm(x, self.norm, 1e-5), weights["gate_up"], None
            )
            return run.run_add(gated, weights["down"], None, x)

        def run() -> None:
            x = self.x
            for index in range(2 * LAYERS):
                x = layer(index, x)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        run()
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (4 * LAYERS))
        return statistics.median(times)


def like(
    tiling: AnyTiling | None, cuts: list[tuple[int, int, int]], depths: Depths
) -> Iterator[Tiling]:
    """Tilings of the same tiles and shares, and of other cuts."""
    if isinstance(tiling, Tiling):
        for block_n, share, warps in cuts:
            yield from like(replace(tiling, block_n=block_n, share=share, warps=warps), [], depths)
        registers = REGISTERS.get(tiling.warps, (tiling.registers,))
        for bound, stages, prefetch in itertools.product(registers, *depths):
            yield replace(tiling, registers=bound, stages=stages, prefetch=prefetch)


def search(
    layers: Layers, pool: ProcessPoolExecutor, rows: int, cuts: Cuts, depths: Depths
) -> None:
    best = layers.tuned(rows)
    kernels = {}
    wanted: dict[str, list[AnyTiling]] = {}
    for name, tuned in best.items():
        n, k, epilogues = SHAPES[name]
        problem = Problem(layers.form, n, k, rows, epilogues[0])
        first = layers.weights[name][0]
        wanted[name] = [*like(tuned, cuts[name], depths), *held_candidates(problem, first)]
        for tiling in wanted[name]:
            if key(problem, tiling) not in kernels:
                packed = on_meta(first.packed)
                kernels[key(problem, tiling)] = pool.submit(build, packed, problem, tiling)
    for future in kernels.values():
        future.exception()  # what cannot be built is told where it is timed
    print(f"{rows:>4} rows, as tuned {layers.us(best):.2f} us a layer", flush=True)
    for name in ORDER:
        ranking = []
        for tiling in (best[name], *wanted[name]):
            try:
                ranking.append((layers.us(best | {name: tiling}), len(ranking), tiling))
            except Exception as error:  # told, and the next one is tried
                print(f"FAILED: {name} {tiling}: {error!r:.200}")
        ranking.sort()
        best[name] = ranking[0][2]
        for us, _, tiling in ranking[:5]:
            print(f"{'':>4} {name:<8} {us:>7.2f} us  {tiling and values_of(tiling)}", flush=True)
    print(f"{rows:>4} rows, best {layers.us(best):.2f} us a layer", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    exact = [name for name, form in FORMATS.items() if form.rounded is None]
    parser.add_argument("--format", choices=exact, default="int4")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--context", type=int, default=1088, help="tokens of each request")
    parser.add_argument("--cut", nargs="*", default=[], metavar="NAME:BLOCK_N,SHARE,WARPS")
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--prefetch", type=int, nargs="+", default=PREFETCH)
    args = parser.parse_args()
    cuts: dict[str, list[tuple[int, int, int]]] = {name: [] for name in ORDER}
    for name, _, sizes in (each.partition(":") for each in args.cut):
        block_n, share, warps = map(int, sizes.split(","))
        cuts[name].append((block_n, share, warps))
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    layers = Layers(args.format)
    pools = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"))
    with pools(os.cpu_count()) as pool:
        for rows in args.rows:
            layers.load(rows, args.context)
            search(layers, pool, rows, cuts, (args.stages, args.prefetch))


if __name__ == "__main__":
    main()
