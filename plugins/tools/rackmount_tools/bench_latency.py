"""`rackmount bench latency`: prefill and decode steps against the least time they could take.

Prompts of random ids, greedy, through any end of sequence, no prefix cache. Prefill is the time of
a batch to its first tokens. A decode step is (time for 1 + output_len tokens - time for 1) /
output_len. The steady step is the median of steps in which all requests decode, as the device's own
clock sees them where they run in this process, else the host's. The experts that decode steps
touch are counted in a run of their own, and their floor counts these.

A GPU rests before each run of that difference. One that has just computed much is slower for a
while: on an H200 prefill of 16 x 1024 tokens takes 364 ms after a rest and 375 to 391 ms after
another prefill, which would count as 0.1 to 0.2 ms of each decode step.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from rackmount import Engine, EngineOptions, unfold
from rackmount_registry.errors import ConfigError
from rackmount_tools.clocks import DeviceClock, HostClock, clock_of_steps
from rackmount_tools.experts_touched import distinct_experts
from rackmount_tools.floors import Floors
from rackmount_tools.loads import Prompts, random_prompts
from rackmount_tools.record import (
    JsonFile,
    describe_ceilings,
    describe_engine,
    print_ceilings,
    print_table,
    write_record,
)
from rackmount_tools.runs import (
    greedy,
    measured_floors,
    open_engine,
    require_room,
    seats,
    timed,
)
from rackmount_tools.shapes import ModelOrShape

COLUMNS = {
    "batch": "batch",
    "phase": "phase",
    "clock": "clock",
    "ms": "ms",
    "floor_ms": "floor ms",
    "share": "reached",
    "tokens_per_s": "tok/s",
    "distinct_experts": "experts a layer",
}


REST_S = 0.5
"""Clocks are back after some 60 ms."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Medians, in seconds."""

    prefill: float
    step: float


def measure(
    engine: Engine,
    prompts: Prompts,
    output_len: int,
    repeats: int,
    rest: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> Times:
    """Times the prompts for one token and for `output_len` more, in turn, each after a `rest`."""

    def rested(num_tokens: int) -> float:
        rest()
        return timed(engine, prompts, greedy(num_tokens), now)

    pairs = [(rested(1), rested(1 + output_len)) for _ in range(repeats)]
    return Times(
        prefill=statistics.median(first for first, _ in pairs),
        step=statistics.median((both - first) / output_len for first, both in pairs),
    )


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Steps in which all requests decode."""

    step: float
    """Median, in seconds."""
    context: int
    """Mean tokens of a request, in the middle of them."""
    count: int


def measure_steady(
    engine: Engine, prompts: Prompts, max_tokens: int, clock: HostClock | DeviceClock
) -> Steady | None:
    """Follows the answers of `max_tokens` tokens; None where no two steps have all requests in
    them."""
    waiting, ended, received = set(range(len(prompts))), False, 0
    totals: list[int] = []
    last = -1
    """The request that began last: one chunk of it is one step."""
    for chunk in engine.stream(prompts, greedy(max_tokens)):
        received += len(chunk.token_ids)
        if chunk.prompt_index in waiting:
            waiting.remove(chunk.prompt_index)
            last = chunk.prompt_index
        ended = ended or chunk.finish_reason is not None
        if not waiting and not ended and chunk.prompt_index == last:
            clock.mark()
            totals.append(received)
    times = clock.intervals()
    if not times:
        return None
    tokens = sum(map(len, prompts)) + statistics.median(totals)
    return Steady(
        step=statistics.median(times), context=round(tokens / len(prompts)), count=len(times)
    )


def rest(engine: Engine) -> None:
    """Leaves a GPU in peace for a while; a CPU needs none."""
    if engine.rack.device.type == "cuda":
        time.sleep(REST_S)


def warm_up(engine: Engine, prompts: Prompts) -> None:
    """Two full steps of prefill, and some decoding of the whole batch."""
    budget = 2 * engine.config.max_num_batched_tokens
    timed(engine, prompts[: -(-budget // len(prompts[0]))], greedy(4))
    timed(engine, [prompt[:16] for prompt in prompts], greedy(8))


def rows_of(
    engine: Engine, floors: Floors, batch: int, input_len: int, output_len: int, repeats: int
) -> list[dict[str, Any]]:
    """The figures of one batch size: prefill, decode step, and steady step where there is one."""
    prompts = random_prompts(batch, input_len, engine.rack.draft.vocab_size, seed=batch)
    ramp = ramp_len(batch, input_len, engine.config.max_num_batched_tokens)
    require_room(engine, [input_len + ramp + output_len] * batch)
    warm_up(engine, prompts)
    times = measure(engine, prompts, output_len, repeats, partial(rest, engine))
    clock = clock_of_steps(engine)
    steady = measure_steady(engine, prompts, ramp + output_len, clock)
    distinct = distinct_experts(engine, prompts, ramp + output_len)
    prefill_floor = floors.prefill([input_len] * batch)
    step_floor = float(
        np.mean(
            [floors.decode([input_len + i] * batch, distinct) for i in range(1, output_len + 1)]
        )
    )
    phases = [
        ("prefill", HostClock.name, times.prefill, prefill_floor, batch * input_len),
        ("step", HostClock.name, times.step, step_floor, batch),
    ]
    if steady is not None:
        floor = floors.decode([steady.context] * batch, distinct)
        phases.append(("steady", clock.name, steady.step, floor, batch))
    rows = [_against(batch, *phase) for phase in phases]
    if distinct:
        for row in rows[1:]:
            row |= {"distinct_experts": float(np.mean(distinct)), "distinct_by_layer": distinct}
    return rows


def ramp_len(batch: int, input_len: int, max_num_batched_tokens: int) -> int:
    """Steps at most from the first token of the first request to that of the last: each step
    decodes those that have begun and prefills with what is left of the budget."""
    left = max(1, max_num_batched_tokens - batch)
    return -(-batch * input_len // left) + 2


def _against(
    batch: int, phase: str, clock: str, seconds: float, floor: float, num_tokens: int
) -> dict[str, Any]:
    return {
        "batch": batch,
        "phase": phase,
        "clock": clock,
        "ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "share": floor / seconds,
        "tokens_per_s": num_tokens / seconds,
    }


def numbers_of(text: str, option: str) -> list[int]:
    """ "1,16" as numbers."""
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option}={text!r} must be numbers from 1 on with commas between")
    return numbers


@unfold
def bench(
    ctx: typer.Context,
    model: ModelOrShape,
    batch_sizes: Annotated[
        str, typer.Option(help="Requests at once, with commas between.")
    ] = "1,16,64,256",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens after the first.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs; medians count.")] = 3,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Prefill and decode steps of MODEL, beside the least time that this device could take."""
    sizes = numbers_of(batch_sizes, "batch_sizes")
    arguments = engine.arguments() | {
        "enable_prefix_caching": False,
        "max_num_seqs": seats(engine, max(sizes), f"batch_sizes={batch_sizes!r}"),
    }
    ramp = max(ramp_len(size, input_len, engine.max_num_batched_tokens) for size in sizes)
    longest = input_len + ramp + output_len
    because = {
        "input_len": input_len,
        "output_len": output_len,
        "batch_sizes": batch_sizes,
        "tokens until all decode": ramp,
    }
    with open_engine(model, arguments, ctx.obj, longest=longest, because=because) as mounted:
        floors = measured_floors(mounted)
        rows = [
            row
            for size in sizes
            for row in rows_of(mounted, floors, size, input_len, output_len, repeats)
        ]
        figures = {
            "engine": describe_engine(mounted),
            "ceilings": describe_ceilings(floors.ceilings),
            "input_len": input_len,
            "output_len": output_len,
            "preemptions": mounted.stats.total_preemptions,
            "phases": rows,
        }
    print_table(f"{model}: {input_len} tokens in, {output_len} out", COLUMNS, rows)
    print_ceilings(floors.ceilings)
    write_record(json_file, figures)
