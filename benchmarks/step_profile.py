"""Where a step's time goes on this GPU, kernel by kernel.

Usage: python benchmarks/step_profile.py [--model llama-8b] [--batch 1 16 64 256] [--prefill 16]
       [--mixed 64] [--input-len 1024] [--trace FILE.json] [--out FILE.json]
       [--engine key=value ...]

Random weights, greedy. Decode steps of so many requests, the prefill of so many prompts, and steps
in which so many requests decode while prompts of 8192 tokens fill what is left of them. From
the profiler's trace, each kernel has the time from the end of the kernel before to its own end:
kernels that start early and wait for the one before do not count twice, and gaps count for what
comes after them. The host's clock gives the whole step over other steps, unobserved.
"""

import argparse
import json
import shlex
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rackmount import Engine, SamplingParams
from rackmount_tools.machine import describe_machine
from rackmount_tools.shapes import resolved

STEPS = 16
LONG = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--mixed", type=int, nargs="*", default=[])
    parser.add_argument("--trace", type=Path, help="the last decode profile, for a viewer")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--engine", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    given: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_model_len": 4096}
    if args.mixed:
        given |= {"max_model_len": LONG + 1, "enable_mixed_steps": True}
    given |= {key: _value(text) for key, text in (each.split("=", 1) for each in args.engine)}
    figures = {}
    with resolved(args.model, given) as (model, given), Engine(model, **given) as engine:
        for batch in args.batch:
            figures[f"decode {batch}"] = decode(engine, batch, args.input_len, args.trace)
        for batch in args.prefill:
            figures[f"prefill {batch}"] = prefill(engine, batch, args.input_len)
        for batch in args.mixed:
            figures[f"mixed {batch}"] = decode(engine, batch, args.input_len, args.trace, True)
        for name, each in figures.items():
            show(name, each)
    if args.out:
        machine = describe_machine("torch", "triton") | {"device": torch.cuda.get_device_name()}
        command = shlex.join(["python", *sys.argv])
        record = {
            "command": command,
            "machine": machine,
            "model": args.model,
            "engine": given,
            "steps": figures,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def prompts_of(engine: Engine, batch: int, input_len: int) -> list[list[int]]:
    vocab = engine.rack.draft.vocab_size
    return torch.randint(vocab, (batch, input_len)).tolist()


def decode(
    engine: Engine, batch: int, input_len: int, file: Path | None, mixed: bool = False
) -> dict[str, Any]:
    """Microseconds a step, of each kernel and in all. `mixed`: long prompts wait behind those who
    decode, more than can be computed beside them."""
    num_tokens = 4 * STEPS + 40
    params = [SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)] * batch
    prompts = prompts_of(engine, batch, input_len)
    if mixed:
        num_long = num_tokens * engine.rack.config.max_num_batched_tokens // LONG + 2
        prompts += prompts_of(engine, num_long, LONG)
        params += [SamplingParams(temperature=0, max_tokens=1)] * num_long
    stream = engine.stream(prompts, params)

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        left = count * batch
        while left:
            left -= next(stream).prompt_index < batch
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6 / count

    steps(batch // 8 + 8)
    step_us = steps(STEPS)
    activities = [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * (file is not None)
    with profile(activities=activities) as trace:
        steps(STEPS)
    stream.close()
    if file:
        trace.export_chrome_trace(str(file))
    return {"step_us": step_us, "kernels": kernels(trace, STEPS)}


def prefill(engine: Engine, batch: int, input_len: int) -> dict[str, Any]:
    """The same for prompts of which all are computed, in as many steps as it takes."""
    params = SamplingParams(temperature=0, max_tokens=1)
    times = []
    for _ in range(3):
        prompts = prompts_of(engine, batch, input_len)
        begin = time.perf_counter()
        engine.generate(prompts, params)
        times.append((time.perf_counter() - begin) * 1e6)
    prompts = prompts_of(engine, batch, input_len)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        engine.generate(prompts, params)
    return {"step_us": min(times), "kernels": kernels(trace, 1)}


def kernels(trace: profile, num_steps: int) -> dict[str, dict[str, float]]:
    """By name, the longest first: microseconds and launches a step."""
    found: dict[str, list[float]] = defaultdict(list)
    events = [it for it in trace.events() if it.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda it: it.time_range.end)
    for before, event in pairwise(events):
        found[event.name].append(event.time_range.end - before.time_range.end)
    return {
        name: {"us": sum(times) / num_steps, "launches": len(times) / num_steps}
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    }


def show(name: str, figures: dict[str, Any]) -> None:
    busy = sum(each["us"] for each in figures["kernels"].values())
    print(f"{name}: step {figures['step_us']:.0f} us, kernels {busy:.0f} us")
    for name, each in list(figures["kernels"].items())[:14]:
        print(f"  {each['us']:9.1f} us {each['launches']:7.1f} x  {name[:90]}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    main()
