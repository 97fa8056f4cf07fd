"""A step's delta to the ranks of a host: the ring, and pickle through pipes, in one run.

Usage: python benchmarks/ring.py [--ranks 2] [--rounds 2000] [--out FILE.json]

The delta is that of 256 decoding requests, as the scheduler makes it. Both ways take the same plans
in turn to the same readers:

- `send`: what it takes of the driver, which schedules and samples for all, until it goes on;
- `arrive`: until the last reader has the plan decoded, by the clock that processes share.

Each reader waits in turn for the ring and for its pipe. The driver sleeps before each plan, as it
does while a step runs. Measured twice: with readers that look for the ring's next plan while they
wait, as ranks on GPUs do, and with readers that sleep, as on CPUs; those of pipes always sleep.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rackmount import Request, SamplingParams, Scheduler, SchedulerConfig
from rackmount.execution.codec import MessageCodec
from rackmount.sampling.request import SamplingRequest
from rackmount.scheduling.plan import StepPlan
from rackmount_executors.ring import RING_BYTES, RingReader, RingWriter
from rackmount_tools.machine import describe_machine

BATCH = 256
PAUSE_S = 0.001
SPIN_S = 0.002
WARM_UP = 50


def decodes(context: int, count: int) -> list[StepPlan]:
    """Plans of `BATCH` decodes after prompts of `context` tokens."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=BATCH * ((context + count) // 16 + 2),
            block_size=16,
            max_num_seqs=BATCH,
            max_num_batched_tokens=BATCH * context,
            max_model_len=context + count + 2,
            vocab_size=1000,
        )
    )
    for index in range(BATCH):
        scheduler.add(
            Request(
                request_id=str(index),
                prompt_token_ids=np.full(context, index, np.int32),
                max_tokens=count + 2,
                stop_ids=frozenset(),
                sampling=SamplingRequest(
                    params=SamplingParams(), seed=0, bad_words_ids=[], stop_ids=frozenset()
                ),
            )
        )
    plans = []
    for _ in range(count + 1):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, np.ones(int(plan.samples.sum()), np.int64))
        plans.append(plan)
    return plans[1:]


def read(
    memory: mmap, written: int, freed: int, spin_s: float, pipe: Connection, rounds: int
) -> None:
    """A reader: sends back when it had each plan, by the ring and by pickle."""
    ring, codec = RingReader(memory, 0, written, freed, spin_s), MessageCodec()
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        plan: Any = codec.decode(ring.read())
        by_ring = time.perf_counter()
        assert len(plan.rows) == BATCH
        plan = pipe.recv()
        times.append((by_ring, time.perf_counter()))
        assert len(plan.rows) == BATCH
    pipe.send(times)


def measure(plans: list[StepPlan], num_ranks: int, spin_s: float) -> dict[str, Any]:
    """Medians in microseconds, by way and figure, and how much faster the ring is."""
    memory, codec = mmap(-1, RING_BYTES), MessageCodec()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(num_ranks)]
    written, freed = ([os.pipe() for _ in range(num_ranks)] for _ in range(2))
    readers = [
        context.Process(target=read, args=(memory, w[0], f[1], spin_s, pipe[1], len(plans)))
        for w, f, pipe in zip(written, freed, pipes, strict=True)
    ]
    for reader in readers:
        reader.start()
    ring = RingWriter(memory, 0, [w for _, w in written], [r for r, _ in freed])
    marks = []
    for plan in plans:
        time.sleep(PAUSE_S)
        begin_ring = time.perf_counter()
        ring.write(codec.encode(plan), lambda: None)
        end_ring = time.perf_counter()
        time.sleep(PAUSE_S)
        begin_pickle = time.perf_counter()
        for ours, _ in pipes:
            ours.send(plan)
        marks.append((begin_ring, end_ring, begin_pickle, time.perf_counter()))
    arrivals = np.array([ours.recv() for ours, _ in pipes]).max(0)
    for reader in readers:
        reader.join()
    figures: dict[str, Any] = {}
    for way, column in (("ring", 0), ("pickle", 1)):
        begin, end = (np.array([mark[2 * column + i] for mark in marks]) for i in range(2))
        figures[way] = {
            "send_us": _median(end - begin),
            "arrive_us": _median(arrivals[:, column] - begin),
        }
    for name in ("send", "arrive"):
        ratio = figures["pickle"][f"{name}_us"] / figures["ring"][f"{name}_us"]
        figures[f"{name}_speedup"] = round(ratio, 2)
    return figures


def _median(seconds: np.ndarray) -> float:
    return round(statistics.median((seconds[WARM_UP:] * 1e6).tolist()), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for context in (64, 1024):
        plans = decodes(context, args.rounds)
        sizes = [len(MessageCodec().encode(plan)) for plan in plans]
        measured = {
            "readers that look": measure(plans, args.ranks, SPIN_S),
            "readers that sleep": measure(plans, args.ranks, 0.0),
        }
        results[f"context {context}"] = {"largest_bytes": max(sizes), **measured}
        for name, figures in measured.items():
            print(f"context {context}, {name}: {figures}")
    machine = describe_machine("msgspec", "numpy", "torch")
    summary = {"machine": machine, "batch": BATCH, "ranks": args.ranks, "rounds": args.rounds}
    if args.out:
        args.out.write_text(json.dumps(summary | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
