"""Layers and their products on the clock: layer after layer in one CUDA graph, as a model runs
them, each with routes of its own."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rackmount_moe.triton_experts.align import Blocks, Launch, align
from rackmount_moe.triton_experts.launches import (
    Prepared,
    layer_launches,
    product_launch,
    vector_launch,
)
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import Plan, Tiling
from rackmount_registry.experts import ExpertInput

Which = Literal["gate_up", "down"]
"""The first product of a layer, or the second."""
PRODUCTS: tuple[Which, Which] = ("gate_up", "down")
SAMPLES, REPLAYS = 3, 3
"""Of one measurement, and of a graph for one sample."""


@dataclass(frozen=True)
class Timed:
    """Layers of one shape on a GPU, which take turns; together they outgrow the L2 cache."""

    layers: Sequence[Prepared]
    inputs: Mapping[int, Sequence[ExpertInput]]
    """Number of tokens -> inputs of so many, each with experts of its own choice."""
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)

    def layer_us(self, num_tokens: int, plan: Plan, samples: int = SAMPLES) -> float:
        """Microseconds of a whole layer.

        Raises:
            RuntimeError, TritonError: a kernel cannot run.
        """
        calls = [partial(_run, plan, layer, given) for given, layer in self._turns(num_tokens)]
        return graph_us(calls, samples, self.stream)

    def product_us(self, num_tokens: int, which: Which, plan: Plan) -> float:
        """Of one product alone; raises as `layer_us` does."""
        calls = []
        for given, layer in self._turns(num_tokens):
            blocks = None
            if plan.block_m:
                blocks = align(given.expert_ids, len(layer.down.values), plan.block_m)
            calls.append(partial(_launch, launch_of(given, layer, which, plan, blocks)))
        return graph_us(calls, SAMPLES, self.stream)

    def check_context(self) -> None:
        """Raises RuntimeError where an error before broke the GPU's context: nothing runs in this
        process after that, and it repeats the error."""
        torch.cuda.synchronize()

    def _turns(self, num_tokens: int) -> Iterator[tuple[ExpertInput, Prepared]]:
        return zip(self.inputs[num_tokens], itertools.cycle(self.layers), strict=False)

    def touched(self, num_tokens: int) -> float:
        """Distinct experts of a layer, on average."""
        ids = [each.expert_ids for each in self.inputs[num_tokens]]
        return statistics.mean(len(each[each >= 0].unique()) for each in ids)

    def num_bytes(self, num_tokens: int, *packed: Packed) -> float:
        """Weights that must be read at least."""
        tensors = [t for p in packed for t in (p.values, p.scales, p.zeros) if t is not None]
        num_experts = len(packed[0].values)
        return sum(t.nbytes for t in tensors) / num_experts * self.touched(num_tokens)


def _launch(launch: Launch) -> None:
    kernel, grid, arguments = launch
    kernel[grid](**arguments)


def _run(plan: Plan, layer: Prepared, given: ExpertInput) -> None:
    x, out = given.x, torch.empty_like(given.x)
    for launch in layer_launches(plan, layer, x, given.expert_ids, given.weights, out):
        _launch(launch)


def launch_of(
    given: ExpertInput, layer: Prepared, which: Which, plan: Plan, blocks: Blocks | None
) -> Launch:
    """Of one product, from random numbers where another product comes before; `blocks` of the
    plan's size, None where it has none."""
    x, ids = given.x, given.expert_ids

    def new(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), dtype=x.dtype, device=x.device)

    act, weights = new(ids.numel(), layer.gate_up.rows // 2), given.weights
    if blocks is None:
        if which == "gate_up":
            return vector_launch(plan, layer, x, ids, weights, act)
        return vector_launch(plan, layer, act, ids, None, new(len(x), layer.down.rows))
    if which == "gate_up":
        return product_launch(plan, layer, x, ids, blocks, weights, act)
    return product_launch(plan, layer, act, ids, blocks, None, new(ids.numel(), layer.down.rows))


def tiling_of(plan: Plan, which: Which) -> Tiling:
    return plan.gate_up if which == "gate_up" else plan.down


def packed_of(layer: Prepared, which: Which) -> Packed:
    return layer.gate_up if which == "gate_up" else layer.down


def graph_us(calls: Sequence[Callable[[], Any]], samples: int, stream: torch.cuda.Stream) -> float:
    """Median microseconds of a call, from replays of a graph of all of them. The default stream
    cannot be captured."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # loads what was compiled
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
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / REPLAYS / len(calls))
    return statistics.median(times)
