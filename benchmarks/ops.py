"""The op sets in Triton and "torch" on a GPU, operation by operation, in bfloat16.

Usage: python benchmarks/ops.py [--shapes llama-8b qwen3-0.6b qwen3-30b-a3b] [--ops gate ...]
                                [--tokens 1 16 64 256 16384] [--out FILE.json]

Each operation runs on up to 20 different sets of buffers in a row, as one CUDA graph where the op
set allows it, so that launches cost what they cost in a captured step. A time is the median of
several rounds, divided by the calls; bytes are those that must be read and written.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rackmount_backends.torch_ops import TORCH_OPS
from rackmount_backends.triton_ops.op_set import TRITON_OPS
from rackmount_moe.triton_router.router import TRITON_ROUTER
from rackmount_registry.attention import FP8
from rackmount_registry.experts import RouterState, Routing
from rackmount_tools.machine import describe_machine

DTYPE, DEVICE = torch.bfloat16, "cuda"
MAX_COPIES = 20
BUFFER_BYTES = 8 << 30
"""Of all sets of buffers of one operation."""
ROUNDS = 7
ROUND_US = 5000
"""A round repeats the calls until it takes about so long."""
NOT_CAPTURED = ("rotary_write", "build_batch")
"""These ask the host in plain torch."""
BLOCK_SIZE, CONTEXT, MAX_REQUESTS = 16, 4096, 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model that its operations see."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    head_norms: bool
    num_experts: int = 0
    top_k: int = 0


SHAPES = {
    "llama-8b": Shape(
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head_size=128,
        vocab=128256,
        head_norms=False,
    ),
    "qwen3-0.6b": Shape(
        hidden=1024,
        ffn=3072,
        heads=16,
        kv_heads=8,
        head_size=128,
        vocab=151936,
        head_norms=True,
    ),
    "qwen3-30b-a3b": Shape(
        hidden=2048,
        ffn=768,
        heads=32,
        kv_heads=4,
        head_size=128,
        vocab=151936,
        head_norms=True,
        num_experts=128,
        top_k=8,
    ),
}

Arguments = tuple[Any, ...]
Maker = Callable[[], Arguments]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, dtype=torch.int32, device=DEVICE)


def makers(shape: Shape, num_tokens: int) -> dict[str, tuple[int, Maker]]:
    """By operation: the bytes of a call, and what makes a set of arguments."""
    t, n, d = num_tokens, shape.hidden, shape.head_size
    weight, table = randn(n), torch.rand(CONTEXT, 2, d // 2, device=DEVICE)
    vocabulary = randn(shape.vocab, n)
    widths = (shape.heads * d, shape.kv_heads * d, shape.kv_heads * d)
    norms = [randn(d) if shape.head_norms else None for _ in range(2)]
    num_requests = min(t, MAX_REQUESTS)
    blocks = CONTEXT // BLOCK_SIZE

    def rotary_write() -> Arguments:
        q, k, v = (x.unflatten(1, (-1, d)) for x in randn(t, sum(widths)).split(widths, 1))
        cache = randn(2, t, shape.kv_heads, d)
        slots = torch.randperm(t, device=DEVICE).int()
        return q, k, v, integers(CONTEXT, t), table, *norms, 1e-6, False, cache, slots

    def mapped_write() -> Arguments:
        scales = [torch.ones(shape.kv_heads, device=DEVICE) for _ in range(2)]
        *given, cache, slots = rotary_write()
        return *given, cache.to(FP8), slots, *scales, randn(d, d), randn(d, d)

    def build_batch() -> Arguments:
        rows = torch.randperm(MAX_REQUESTS, device=DEVICE)[:num_requests].int()
        lengths = torch.full((num_requests,), CONTEXT, dtype=torch.int32, device=DEVICE)
        ids = integers(MAX_REQUESTS, t) - MAX_REQUESTS // 2
        last_ids = integers(shape.vocab, MAX_REQUESTS)
        tables = integers(1 << 20, MAX_REQUESTS, 2 * blocks)
        return ids, rows, lengths, last_ids, tables, tables[:num_requests].clone(), BLOCK_SIZE

    def gate() -> Arguments:
        state = RouterState.fresh(shape.num_experts, torch.device(DEVICE))
        slots = torch.arange(t, dtype=torch.int32, device=DEVICE)
        router = randn(shape.num_experts, n) / n**0.5
        return randn(t, n), router, Routing(top_k=shape.top_k), None, slots, state

    def penalize(*factors: float) -> Arguments:
        rows = torch.randperm(MAX_REQUESTS, device=DEVICE)[:num_requests].int()
        table = torch.tensor([factors] * MAX_REQUESTS, dtype=torch.float64, device=DEVICE)
        counts = torch.zeros(MAX_REQUESTS, shape.vocab, dtype=torch.int32, device=DEVICE)
        counts.scatter_(1, integers(shape.vocab, MAX_REQUESTS, CONTEXT).long(), 1)
        return randn(num_requests, shape.vocab).float(), rows, table, counts

    def logprobs() -> Arguments:
        return randn(num_requests, shape.vocab), integers(shape.vocab, num_requests).long(), 5

    two = DTYPE.itemsize
    routed = {"gate": ((shape.num_experts + t) * n * two, gate)} if shape.num_experts else {}
    return routed | {
        "rms_norm": (2 * t * n * two, lambda: (randn(t, n), weight, 1e-5)),
        "add_rms_norm": (4 * t * n * two, lambda: (randn(t, n), randn(t, n), weight, 1e-5)),
        "silu_mul": (3 * t * shape.ffn * two, lambda: randn(t, 2 * shape.ffn).chunk(2, -1)),
        "rotary_write": (2 * t * sum(widths) * two, rotary_write),
        "rotary_write, mapped": (2 * t * sum(widths) * two, mapped_write),
        "embedding": (2 * t * n * two, lambda: (integers(shape.vocab, t), vocabulary, 0)),
        "build_batch": (2 * 4 * (num_requests * blocks + t), build_batch),
        "penalize": (4 * num_requests * shape.vocab, lambda: penalize(1.2, 0.1, 0.1)),
        "penalize, neutral": (4 * num_requests * shape.vocab, lambda: penalize(1.0, 0.0, 0.0)),
        "logprobs": (two * num_requests * shape.vocab, logprobs),
    }


def microseconds(call: Callable[..., Any], buffers: list[Arguments], captured: bool) -> float:
    """Of one call, of which there is one per set of buffers."""

    def run() -> None:
        for arguments in buffers:
            call(*arguments)

    run()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    repeats = max(1, round(ROUND_US / _elapsed_us(run, 3)))
    rounds = [_elapsed_us(run, repeats) for _ in range(ROUNDS)]
    return statistics.median(rounds) / len(buffers)


def _elapsed_us(run: Callable[[], None], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def measure(name: str, make: Maker, num_bytes: int) -> dict[str, float]:
    """Microseconds of both op sets, and the rate that the triton one reaches."""
    copies = max(2, min(MAX_COPIES, BUFFER_BYTES // num_bytes))
    buffers = [make() for _ in range(copies)]
    name = name.partition(",")[0]
    op_set = TRITON_ROUTER if name == "gate" else TRITON_OPS
    ours = microseconds(getattr(op_set, name), buffers, captured=True)
    plain = microseconds(getattr(TORCH_OPS, name), buffers, captured=name not in NOT_CAPTURED)
    return {
        "triton_us": round(ours, 2),
        "tb_per_s": round(num_bytes / ours / 1e6, 3),
        "torch_us": round(plain, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 16384])
    parser.add_argument("--ops", nargs="+", help="only these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        for num_tokens in args.tokens:
            for name, (num_bytes, make) in makers(SHAPES[shape], num_tokens).items():
                if args.ops and name not in args.ops:
                    continue
                figures = measure(name, make, num_bytes)
                results.append({"shape": shape, "tokens": num_tokens, "op": name} | figures)
                torch.cuda.empty_cache()
    if args.out:
        machine = describe_machine("torch", "triton") | {"gpu": torch.cuda.get_device_name()}
        shapes = {name: asdict(SHAPES[name]) for name in args.shapes}
        record = {"machine": machine, "shapes": shapes, "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'shape':<12}{'tokens':>7} {'op':<21}{'triton us':>10}{'TB/s':>7}{'torch us':>10}")
    for row in results:
        print(
            f"{row['shape']:<12}{row['tokens']:>7} {row['op']:<21}{row['triton_us']:>10.2f}"
            f"{row['tb_per_s']:>7.2f}{row['torch_us']:>10.2f}"
        )


if __name__ == "__main__":
    main()
