"""Sampling on a GPU: Triton's `sample` beside its definition, by kind of draw.

Usage: python benchmarks/sampling.py [--rows 1 16 64 256] [--vocab 151936] [--out FILE.json]

Logits are bfloat16, normal with a standard deviation of `--scale`: at 1 the distribution is nearly
flat, the worst case of top-k and top-p; at 4 few tokens lead. Triton's time is that of a call in a
CUDA graph over several sets of logits, the definition's that of a call which asks the host. Each is
the median of several rounds.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rackmount_backends.triton_ops.sampling import sample
from rackmount_registry import ops
from rackmount_registry.sampling import Draw, SamplingState
from rackmount_tools.machine import describe_machine

DEVICE = "cuda"
COPIES = 8
"""Sets of logits, so that none is found in the cache."""
ROUNDS = 7
OFF = {"top_p": 2.0, "min_x": -float("inf")}
KINDS: dict[str, tuple[Draw, dict[str, float]]] = {
    "greedy": (Draw.GREEDY, {}),
    "whole": (Draw.WHOLE, {}),
    "top-k 50": (Draw.TOP_K, {"top_k": 50}),
    "top-k 20, top-p 0.95": (Draw.TOP_K, {"top_k": 20, "top_p": 0.95}),
    "top-p 0.9": (Draw.TOP_P, {"top_p": 0.9}),
}


def state_of(kind: str, num_rows: int, vocab_size: int) -> SamplingState:
    draw, given = KINDS[kind]
    numbers = {"temperature": 1.0, "top_k": float(vocab_size)} | OFF | given
    state = SamplingState.greedy(num_rows, torch.device(DEVICE))
    state.draws[:-1] = draw
    state.numbers[:-1] = torch.tensor(list(numbers.values()), dtype=torch.float64)
    state.seeds.random_()
    return state


def microseconds(run: Callable[[], Any], repeats: int) -> float:
    """Of one run, `repeats` of which are timed together."""
    run()
    rounds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(rounds)


def measure(kind: str, logits: list[Tensor]) -> dict[str, float]:
    num_rows, vocab_size = logits[0].shape
    state = state_of(kind, num_rows, vocab_size)
    rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)

    def run() -> None:
        for each in logits:
            sample(each, rows, rows, state)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    ours = microseconds(graph.replay, 20) / len(logits)
    plain = microseconds(lambda: ops.sample(logits[0], rows, rows, state), 3)
    return {"triton_us": round(ours, 2), "torch_us": round(plain, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--scale", nargs="+", type=float, default=[1, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for scale in args.scale:
        for num_rows in args.rows:
            logits = [
                (torch.randn(num_rows, args.vocab, device=DEVICE) * scale).bfloat16()
                for _ in range(COPIES)
            ]
            for kind in KINDS:
                where = {"scale": scale, "rows": num_rows, "kind": kind}
                results.append(where | measure(kind, logits))
    if args.out:
        machine = describe_machine("torch", "triton") | {"gpu": torch.cuda.get_device_name()}
        record = {"machine": machine, "vocab": args.vocab, "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'scale':>5}{'rows':>5} {'kind':<22}{'triton us':>10}{'torch us':>10}")
    for row in results:
        print(
            f"{row['scale']:>5g}{row['rows']:>5} {row['kind']:<22}{row['triton_us']:>10.2f}"
            f"{row['torch_us']:>10.1f}"
        )


if __name__ == "__main__":
    main()
