"""What a process of its own costs a rank: decode steps in this process and in another, in one run.

Usage: python benchmarks/executor_overhead.py [--model llama-8b] [--pairs 6] [--out FILE.json]
       [--engine key=value ...]

A shape with random weights is mounted twice at tp=1: by the in-process executor and by the
multiprocess one. Every decode step is timed, greedy, both in turn; the ratio of the medians counts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from rackmount import Engine, SamplingParams
from rackmount_tools.machine import describe_machine
from rackmount_tools.shapes import resolved

PROMPT_TOKENS = 64
WAYS = ("in-process", "multiprocess")
EDGE = 4
"""Steps at either end that are not steady: of the prompts, and with none or no other under way."""


def step_ms(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Milliseconds of each steady decode step: what `engine.core.step` takes, a step being under
    way already."""
    times = []
    step = engine.core.step

    def timed() -> bool:
        start = time.perf_counter()
        stepped = step()
        times.append((time.perf_counter() - start) * 1e3)
        return stepped

    engine.core.step = timed  # type: ignore[method-assign]
    try:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.generate(prompts, params)
    finally:
        engine.core.step = step  # type: ignore[method-assign]
    return times[EDGE:-EDGE]


def compare(engines: dict[str, Engine], batch: int, num_tokens: int, pairs: int) -> dict[str, Any]:
    """Quartiles of the steps of both, and the ratio of their medians."""
    vocab = engines[WAYS[0]].rack.draft.vocab_size
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(vocab, (batch, PROMPT_TOKENS), generator=generator).tolist()
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(pairs + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            taken = step_ms(engines[way], prompts, num_tokens)
            steps[way] += taken if number else []  # the first pair warms up
    quartiles = {way: statistics.quantiles(steps[way], n=4) for way in WAYS}
    mine, other = (quartiles[way] for way in WAYS)
    figures = {f"{way}_quartiles_ms": [round(q, 3) for q in quartiles[way]] for way in WAYS}
    return figures | {"ratio": round(other[1] / mine[1], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--engine", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    limits = {
        "max_model_len": 1024,
        "max_num_seqs": max(args.batches),
        "num_kv_blocks": max(args.batches) * 64,
        "block_size": 16,
        "enable_prefix_caching": False,
    }
    given = dict(each.split("=", 1) for each in args.engine)
    with resolved(args.model, limits | given) as (model, arguments):
        engines = {way: Engine(model, executor=way, **arguments) for way in WAYS}
    results = {
        f"batch {batch}": compare(engines, batch, args.tokens, args.pairs) for batch in args.batches
    }
    device = engines[WAYS[0]].rack.device
    for engine in engines.values():
        engine.close()
    machine = describe_machine("torch", "triton") | {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "model": args.model,
    }
    summary = json.dumps({"machine": machine, "decode_step": results}, indent=1)
    print(summary)
    if args.out:
        args.out.write_text(summary + "\n")


if __name__ == "__main__":
    main()
