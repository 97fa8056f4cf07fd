"""Layers of experts to be timed: random weights in any format, together far larger than the L2
cache, routes and the floor."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.timing import Timed
from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight

DTYPE = torch.bfloat16
READ, ARITHMETIC = 4.3e12, 791e12
"""Bytes and operations a second that an H200 was seen to do."""
NUM_LAYERS = 4
GROUP = 128


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


class Bench:
    """Layers of one format, and routes for some numbers of tokens."""

    def __init__(self, fmt: str, shape: Shape, tokens: Iterable[int]) -> None:
        torch.manual_seed(0)
        self.format, self.shape = fmt, shape
        self.bundle = make_bundle(fmt, shape)
        kernel = TritonExperts()
        layers = [kernel.prepare(self.bundle)]
        while len(layers) < NUM_LAYERS:
            layers.append(kernel.prepare(make_bundle(fmt, shape)))
        self.timed = Timed(layers, {each: list(self._inputs(each)) for each in tokens})

    def _inputs(self, tokens: int) -> Iterator[ExpertInput]:
        count = 16 if tokens <= 64 else 8 if tokens <= 1024 else 4
        return (make_input(self.shape, tokens) for _ in range(count))

    def floor_us(self, tokens: int) -> float:
        slots = tokens * self.shape.top_k
        flops = 6 * slots * self.shape.hidden * self.shape.width
        layer = self.timed.layers[0]
        read = self.timed.num_bytes(tokens, layer.gate_up, layer.down)
        return max(read / READ, flops / ARITHMETIC) * 1e6
