"""`rackmount bench interference`: how long prompts that come without pause slow down those who
decode.

A number of requests decode; behind them long prompts wait, of which one or another is always being
prefilled, each answered with one token. What counts is the time between two tokens of a decoding
request, over all of them and all steps in which they all decode, beside the floor of such a step,
with its mean share of the long prompts. The same is measured first without them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any

import numpy as np
import typer

from rackmount import Engine, EngineOptions, unfold
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_tools.bench_latency import ramp_len
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
    "load": "load",
    "itl_p50_ms": "between tokens, p50 ms",
    "floor_ms": "floor of a step ms",
    "share": "reached",
    "itl_p99_ms": "p99 ms",
    "itl_max_ms": "longest ms",
    "tokens_per_s": "in + out tok/s",
    "output_tokens_per_s": "out tok/s of those who decode",
}


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps in which all who decode do."""

    gaps: np.ndarray
    """Seconds between two tokens of a request, all together."""
    seconds: float
    computed: int
    """Tokens that the model computed, prompts included."""
    context: int
    """Mean tokens of a request, in the middle of them."""


def measure(
    engine: Engine,
    decoding: Prompts,
    max_tokens: int,
    long: Prompts,
    now: Callable[[], float] = time.perf_counter,
) -> Window:
    """Answers `decoding` with so many tokens each while `long` are prefilled behind them.

    Raises:
        RackmountError: the long prompts were all done before those who decode.
    """
    params = [greedy(max_tokens)] * len(decoding) + [greedy(1)] * len(long)
    waiting, times = set(range(len(decoding))), [list[float]() for _ in decoding]
    num_done, computed, begin, end = 0, 0, 0.0, 0.0
    received = first = sum(map(len, decoding))
    chunks = engine.stream([*decoding, *long], params)
    for chunk in chunks:
        index, at = chunk.prompt_index, now()
        if index >= len(decoding):
            num_done += 1
            continue
        received += len(chunk.token_ids)
        if waiting:
            waiting.discard(index)
            begin, computed, first = at, engine.stats.total_computed_tokens, received
            continue
        times[index].append(at)
        end = at
        if chunk.finish_reason is not None:
            break
    computed = engine.stats.total_computed_tokens - computed
    chunks.close()
    if long and num_done == len(long):
        raise RackmountError(f"all {len(long)} long prompts were done before those who decode")
    gaps = [b - a for each in times for a, b in pairwise(each)]
    return Window(
        gaps=np.array(gaps),
        seconds=end - begin,
        computed=computed,
        context=round((first + received) / 2 / len(decoding)),
    )


def warm_up(engine: Engine, decoding: Prompts, max_tokens: int, long: Prompts) -> None:
    """Both loads once, though with two long prompts only: every kind of step has been then, that
    with the end of one and the beginning of the next too, and nothing is left to be compiled."""
    for behind in ([], long[:2]):
        params = [greedy(max_tokens)] * len(decoding) + [greedy(1)] * len(behind)
        timed(engine, [*decoding, *behind], params)


def figures_of(
    name: str, window: Window, floors: Floors, num_requests: int, long_len: int
) -> dict[str, Any]:
    p50, p99 = np.percentile(window.gaps, [50, 99]) * 1e3
    contexts = [window.context] * num_requests
    chunk = max(0.0, window.computed * num_requests / len(window.gaps) - num_requests)
    floor = floors.decode(contexts, chunk=chunk, prompt_len=long_len) * 1e3
    return {
        "load": name,
        "itl_p50_ms": float(p50),
        "floor_ms": floor,
        "share": floor / float(p50),
        "itl_p99_ms": float(p99),
        "itl_max_ms": float(window.gaps.max() * 1e3),
        "tokens_per_s": window.computed / window.seconds,
        "output_tokens_per_s": len(window.gaps) / window.seconds,
        "seconds": window.seconds,
    }


def _require_both(engine: EngineOptions, num_requests: int) -> None:
    """ConfigError where no step would have decoding and prompts in it."""
    if engine.enable_mixed_steps is False:
        raise ConfigError(
            "enable_mixed_steps=False computes all prompts before those who decode go on, so that "
            "there is nothing between tokens to be measured; leave it out"
        )
    if engine.max_num_batched_tokens <= num_requests:
        raise ConfigError(
            f"max_num_batched_tokens={engine.max_num_batched_tokens} leaves no token of a step to "
            f"the long prompts beside num_requests={num_requests} that decode; choose at least "
            f"{num_requests + 1}"
        )


@unfold
def bench(
    ctx: typer.Context,
    model: ModelOrShape,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of their prompts.")] = 1024,
    output_len: Annotated[int, typer.Option(min=2, help="Steps to be measured.")] = 256,
    long_len: Annotated[int, typer.Option(min=1, help="Tokens of the long prompts.")] = 8192,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Time between two tokens of requests that decode while long prompts arrive without pause."""
    _require_both(engine, num_requests)
    budget = engine.max_num_batched_tokens
    max_tokens = output_len + ramp_len(num_requests, input_len, budget)
    num_long = -(-max_tokens * budget // long_len) + 2
    together = f"num_requests={num_requests} and 8 long ones"
    arguments = engine.arguments() | {
        "enable_prefix_caching": False,
        "max_num_seqs": seats(engine, num_requests + 8, together),
        "enable_mixed_steps": True,  # as in servers
    }
    longest, because = max(
        (long_len + 1, {"long_len": long_len}),
        (
            input_len + max_tokens,
            {
                "num_requests": num_requests,
                "input_len": input_len,
                "output_len": output_len,
                "tokens until all decode": max_tokens - output_len,
            },
        ),
        key=itemgetter(0),
    )
    with open_engine(model, arguments, ctx.obj, longest=longest, because=because) as mounted:
        vocab_size = mounted.rack.draft.vocab_size
        decoding = random_prompts(num_requests, input_len, vocab_size)
        long = random_prompts(num_long, long_len, vocab_size, seed=1)
        require_room(mounted, [input_len + max_tokens] * num_requests + [long_len + 1] * 2)
        floors = measured_floors(mounted)
        warm_up(mounted, decoding, max_tokens, long)
        windows = {
            "alone": measure(mounted, decoding, max_tokens, []),
            "with long prompts": measure(mounted, decoding, max_tokens, long),
        }
        rows = [
            figures_of(name, each, floors, num_requests, long_len) for name, each in windows.items()
        ]
        record = {
            "engine": describe_engine(mounted),
            "ceilings": describe_ceilings(floors.ceilings),
            "num_requests": num_requests,
            "input_len": input_len,
            "long_len": long_len,
            "preemptions": mounted.stats.total_preemptions,
            "loads": rows,
        }
    print_table(f"{model}: {num_requests} requests decode", COLUMNS, rows)
    print_ceilings(floors.ceilings)
    write_record(json_file, record)
