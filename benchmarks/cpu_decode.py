"""Decoding on a CPU: rackmount and transformers on the same weights, in one run.

Usage: python benchmarks/cpu_decode.py [--model smollm2-135m] [--dtype float32] [--out FILE.json]

A decode step is (time for N + 1 tokens - time for 1) / N, greedy, without stopping at EOS. Both
are measured in turn, so that a change of the machine's speed meets both; the median of the pairs
counts.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from rackmount import Engine, SamplingParams
from rackmount.loading.locate import locate, open_checkpoint
from rackmount_registry.checkpoint import silent
from rackmount_registry.plugins import PluginManager
from rackmount_tools.machine import describe_machine

PROMPT_TOKENS = 64

Prompts = list[list[int]]


def oracle(model: str, dtype: torch.dtype) -> Any:
    """The same checkpoint as a transformers model."""
    manager = PluginManager.discover()
    checkpoint = open_checkpoint(locate(model, manager, silent), manager)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = {name: checkpoint.read(name).to(dtype) for name in checkpoint.tensors}
    net = net.to_empty(device="cpu")
    net.load_state_dict(weights, strict=False)
    net.tie_weights()
    net.model.rotary_emb = type(net.model.rotary_emb)(config)
    return net.eval()


def step_ms(run: Callable[[Prompts, int], None], prompts: Prompts, num_tokens: int) -> float:
    """Milliseconds of one decode step."""
    times = []
    for count in (1, num_tokens + 1):
        start = time.perf_counter()
        run(prompts, count)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / num_tokens * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    net = oracle(args.model, getattr(torch, args.dtype))
    engine = Engine(args.model, dtype=args.dtype, device="cpu", enable_prefix_caching=False)
    vocab, results = engine.rack.draft.vocab_size, {}

    def ours(prompts: Prompts, count: int) -> None:
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))

    def theirs(prompts: Prompts, count: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )

    for batch in (1, 8):
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(0, vocab, (batch, PROMPT_TOKENS), generator=generator).tolist()
        steps: dict[str, list[float]] = {"rackmount": [], "transformers": []}
        for _ in range(args.pairs + 1):
            for name, run in (("rackmount", ours), ("transformers", theirs)):
                steps[name].append(step_ms(run, prompts, args.tokens))
        medians = {name: statistics.median(times[1:]) for name, times in steps.items()}
        ratio = statistics.median(
            b / a for a, b in zip(steps["rackmount"][1:], steps["transformers"][1:], strict=True)
        )
        results[f"batch {batch}"] = medians | {"speedup": ratio}
        print(
            f"batch {batch}: rackmount {medians['rackmount']:.2f} ms a step, "
            f"transformers {medians['transformers']:.2f} ms, {ratio:.2f}x"
        )
    if args.out:
        machine = describe_machine("torch", "transformers") | {"threads": torch.get_num_threads()}
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine,
            "model": args.model,
            "dtype": args.dtype,
            "decode_ms": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
