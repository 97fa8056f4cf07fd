"""Layers of experts to be timed: random weights in any format, routes, the clock and the floor.

A layer is timed as a model runs it: layer after layer in one CUDA graph, each with routes of its
own, over weights that are together far larger than the L2.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rackmount_moe.triton_experts import launches
from rackmount_moe.triton_experts.align import Blocks, align
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.launches import Prepared
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.product import product_kernel
from rackmount_moe.triton_experts.tuning import BUCKETS, Plan
from rackmount_moe.triton_experts.vector import vector_kernel
from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight

DTYPE = torch.bfloat16
READ, ARITHMETIC = 4.3e12, 791e12
"""Bytes and operations a second that an H200 was seen to do."""
NUM_LAYERS = 4
GROUP = 128
INF = float("inf")


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    width: int
    top_k: int


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
    act, weights = new(ids.numel(), width), given.weights
    if blocks is None:
        if which == "gate_up":
            return vector_kernel, *launches.vector_launch(plan, layer, x, ids, weights, act)
        out = new(len(x), hidden)
        return vector_kernel, *launches.vector_launch(plan, layer, act, ids, None, out)
    if which == "gate_up":
        return product_kernel, *launches.product_launch(plan, layer, x, ids, blocks, weights, act)
    out = new(ids.numel(), hidden)
    return product_kernel, *launches.product_launch(plan, layer, act, ids, blocks, None, out)


def guarded(calls: list[Callable[[], Any]], samples: int = 3) -> float:
    """Infinite, with a word about it, where a kernel cannot run."""
    try:
        return graph_us(calls, samples)
    except Exception as error:  # a tiling that fails must not end the search
        if "illegal" in str(error):
            raise
        print(f"  cannot run: {type(error).__name__} {str(error)[:120]!r}", flush=True)
        return INF


def itemsize(packed: Packed) -> float:
    return {"dense": DTYPE.itemsize, "int4": 0.5}.get(packed.code, 1)
