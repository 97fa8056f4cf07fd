"""`rackmount bench scheduler`: CPU time of a decode step, with a null model in place of a forward.

Every load runs the real scheduler and the real persistent batch. Loads take turns in rounds of one
block's length, so that whatever else the machine does falls on all of them alike. The requests'
lengths are staggered: in every step one in `block_size` fills its block and needs another.
"""

import gc
import json
import shlex
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rackmount import PersistentBatch, Request, Scheduler, SchedulerConfig
from rackmount_tools.machine import describe_machine

PARTS = ("schedule", "build", "update")
VOCAB_SIZE = 32_000
STOP_ID = 0
"""Every request looks out for it; the null model never samples it."""
PREFILL_TOKENS = 2**20
"""Token budget of a step: fills the cache in few steps and never binds a decode step."""


@dataclass(frozen=True, kw_only=True)
class Load:
    num_requests: int
    context: int


class Run:
    """A load with all its requests decoding, ready for `steps` steps."""

    def __init__(self, load: Load, block_size: int, steps: int) -> None:
        # Nobody may end before the last step: who enters first decodes while the rest prefill.
        steps += 4 + load.num_requests * load.context // PREFILL_TOKENS
        max_model_len = load.context + steps
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=load.num_requests * -(-max_model_len // block_size),
                block_size=block_size,
                max_num_seqs=load.num_requests,
                max_num_batched_tokens=PREFILL_TOKENS,
                max_model_len=max_model_len,
                vocab_size=VOCAB_SIZE,
            )
        )
        self._batch = PersistentBatch(
            max_num_seqs=load.num_requests, max_model_len=max_model_len, block_size=block_size
        )
        random = np.random.default_rng(0)
        self._tokens = random.integers(STOP_ID + 1, VOCAB_SIZE, load.num_requests, np.int32)
        for index in range(load.num_requests):
            length = load.context - index % block_size
            self._scheduler.add(
                Request(
                    request_id=str(index),
                    prompt_token_ids=random.integers(STOP_ID + 1, VOCAB_SIZE, length),
                    max_tokens=steps,
                    stop_ids=frozenset({STOP_ID}),
                )
            )
        while self._scheduler.stats.num_waiting:
            self.step()
        self.step()

    def step(self) -> tuple[int, int, int]:
        """Nanoseconds of CPU time for each of `PARTS`; "update" is that of both sides."""
        begin = time.process_time_ns()
        plan = self._scheduler.schedule()
        scheduled = time.process_time_ns()
        assert plan is not None, "all requests decode, so there is always a step"
        self._batch.apply(plan)
        flat = self._batch.build(plan)
        built = time.process_time_ns()
        tokens = self._tokens[: flat.sample_rows.size]
        tenancy = self._batch.expect(flat.sample_rows)
        self._batch.fill(flat.sample_rows, flat.sample_positions, tokens, tenancy)
        self._scheduler.update(plan, tokens)
        return scheduled - begin, built - scheduled, time.process_time_ns() - built


def measure(loads: list[Load], block_size: int, num_rounds: int) -> list[dict[str, Any]]:
    """One row of figures for each load, in microseconds per step."""
    runs = [Run(load, block_size, num_rounds * block_size) for load in loads]
    gc.collect()
    gc.freeze()  # as a server's core does: the cache's blocks are not searched for garbage
    times = np.empty((len(runs), num_rounds, block_size, len(PARTS)))
    for turn in range(num_rounds):
        for place, run in enumerate(runs):
            times[place, turn] = [run.step() for _ in range(block_size)]
    gc.unfreeze()
    return [row(load, times[place] / 1000) for place, load in enumerate(loads)]


def row(load: Load, times: np.ndarray) -> dict[str, Any]:
    """`times` are microseconds [rounds, steps, parts]."""
    totals = times.sum(-1)
    parts = np.median(times, axis=(0, 1)).round(1).tolist()
    return {
        "requests": load.num_requests,
        "context": load.context,
        "median_us": round(float(np.median(totals)), 1),
        "mean_us": round(float(totals.mean()), 1),
        "best_round_us": round(float(np.median(totals, axis=1).min()), 1),
        "parts_median_us": dict(zip(PARTS, parts, strict=True)),
    }


def bench(
    requests: list[int] = typer.Option([256, 1024], min=1, help="Running requests"),
    context: list[int] = typer.Option([2048, 32768], min=1, help="Tokens of each request"),
    block_size: int = typer.Option(16, min=1),
    rounds: int = typer.Option(40, min=1, help="Rounds of block_size steps for each load"),
    as_json: bool = typer.Option(False, "--json", help="Figures and machine as JSON"),
) -> None:
    """CPU time of a decode step: schedule, batch building and update, without a model."""
    loads = [Load(num_requests=r, context=c) for r in requests for c in context]
    rows = measure(loads, block_size, rounds)
    if as_json:
        result = {
            "command": shlex.join(["rackmount", *sys.argv[1:]]),
            "machine": describe_machine("numpy"),
            "block_size": block_size,
            "steps": rounds * block_size,
            "loads": rows,
        }
        typer.echo(json.dumps(result, indent=2))
        return
    base = rows[0]["median_us"]
    table = Table("requests", "context", *PARTS, "median", "mean", "growth", title="µs per step")
    for entry in rows:
        figures = (*entry["parts_median_us"].values(), entry["median_us"], entry["mean_us"])
        growth = f"{entry['median_us'] / base:.2f}x"
        table.add_row(*map(str, (entry["requests"], entry["context"], *figures, growth)))
    Console().print(table)
