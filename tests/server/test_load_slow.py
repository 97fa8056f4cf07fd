"""Many clients at once, a fifth of whom hang up: everyone else is answered, and nothing is left.

RACKMOUNT_LOAD_SECONDS, RACKMOUNT_LOAD_CLIENTS and RACKMOUNT_LOAD_MODEL (a name such as
smollm2-135m, in place of a tiny model whose text is known) make it longer; RACKMOUNT_LOAD_RECORD
names a file for the figures.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.engines import chain_checkpoint
from tests.helpers.served import Served, served
from tests.helpers.streams import Stream, stream

SECONDS = float(os.environ.get("RACKMOUNT_LOAD_SECONDS", "30"))
CLIENTS = int(os.environ.get("RACKMOUNT_LOAD_CLIENTS", "200"))
MODEL = os.environ.get("RACKMOUNT_LOAD_MODEL")
RECORD = os.environ.get("RACKMOUNT_LOAD_RECORD")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]

WARM_SHARE = 0.4
"""Of the time, before which memory may grow: caches fill, and allocators take their share."""
GROWTH_BYTES = 24 * 2**20
PATIENCE_S = 300.0
"""For one answer among so many."""


@dataclass
class Load:
    """What clients saw."""

    answered: int = 0
    hung_up: int = 0
    events: int = 0
    output_tokens: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    """Bytes of each process at some seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pool that the running requests outgrow now and then, and more clients than rows."""
    small = ["--device", "cpu", "--max-num-seqs", "64", "--block-size", "8"]
    if MODEL:
        flags, model = [*small, "--num-kv-blocks", "256"], MODEL
    else:
        model = str(chain_checkpoint(tmp_path_factory.mktemp("chain")))
        flags = [*small, "--num-kv-blocks", "192", "--max-num-batched-tokens", "256"]
    with served(model, *flags) as server:
        yield server


def an_ask(chance: random.Random) -> tuple[dict[str, Any], int | None]:
    """A request, and after how many events its client hangs up."""
    length = int(chance.choice([4, 20, 60, 140]) * chance.uniform(0.5, 1))
    start = chance.randrange(ord("A"), ord("Z") + 1)
    prompt = [start + n % 20 for n in range(length)]
    max_tokens = int(chance.choice([4, 16, 60]) * chance.uniform(0.5, 1))
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    if chance.random() < 0.7:
        body["temperature"] = 0
    else:
        body |= {"temperature": 1.3, "top_p": 0.9, "seed": chance.randrange(100)}
    if chance.random() < 0.1:
        body |= {"logprobs": 3}
    goes = chance.random() < 0.2
    return body, chance.randrange(max_tokens) if goes else None


def what_is_wrong(body: dict[str, Any], got: Stream) -> str | None:
    """In an answer that was read to its end."""
    if got.status != 200:
        return f"status {got.status} {got.body[:200]!r}"
    if not got.done:
        return f"no [DONE] after {got.events[-1:]}"
    counts = got.usage["prompt_tokens"], got.usage["completion_tokens"]
    if counts != (len(body["prompt"]), body["max_tokens"]):
        return "usage"
    if not MODEL and body["temperature"] == 0:
        first = body["prompt"][-1] + 1
        spelled = bytes((first + n) % 256 for n in range(body["max_tokens"]))
        if got.text != spelled.decode(errors="replace"):
            return "text"
    return None


async def client(server: Served, load: Load, seed: int, until: float) -> None:
    chance = random.Random(seed)
    while time.monotonic() < until:
        body, hang_up_after = an_ask(chance)
        try:
            async with asyncio.timeout(PATIENCE_S):
                got = await stream(server.port, "/v1/completions", body, hang_up_after)
        except (OSError, TimeoutError) as error:
            load.wrong[repr(error)] += 1
            continue
        load.events += len(got.events)
        if hang_up_after is not None:
            load.hung_up += 1
        elif wrong := what_is_wrong(body, got):
            load.wrong[wrong] += 1
        else:
            load.answered += 1
            load.output_tokens += body["max_tokens"]


async def watch(server: Served, load: Load, until: float) -> None:
    """Notes memory, and that the server tells of itself meanwhile."""
    begin = time.monotonic()
    while time.monotonic() < until:
        status = await asyncio.to_thread(server.status, "/health")
        if status != 200:
            load.wrong[f"health {status}"] += 1
        load.memory.append((time.monotonic() - begin, memory_of(server)))
        await asyncio.sleep(min(5.0, SECONDS / 20))


def memory_of(server: Served) -> dict[str, int]:
    """Bytes that each process has to itself."""
    return {
        "front end"
        if each.pid == server.process.pid
        else f"process {n}": each.memory_full_info().uss
        for n, each in enumerate(server.processes())
    }


async def run(server: Served) -> Load:
    load, until = Load(), time.monotonic() + SECONDS
    async with asyncio.TaskGroup() as group:
        group.create_task(watch(server, load, until))
        for seed in range(CLIENTS):
            group.create_task(client(server, load, seed, until))
    return load


def test_a_crowd_of_which_a_fifth_hangs_up_is_answered_and_leaves_nothing(server: Served) -> None:
    front = psutil.Process(server.process.pid)
    warm_up = [asyncio.run(stream(server.port, "/v1/completions", an_ask(random.Random(0))[0]))]
    assert warm_up[0].done
    server.await_idle()
    before = front.num_fds(), len(server.processes())

    began = time.monotonic()
    load = asyncio.run(run(server))
    seconds = time.monotonic() - began
    figures = {
        "model": MODEL or "a chain of bytes",
        "clients": CLIENTS,
        "seconds": round(seconds, 1),
        "answered": load.answered,
        "hung_up": load.hung_up,
        "output_tokens": load.output_tokens,
        "output_tokens_per_s": round(load.output_tokens / seconds, 1),
        "preemptions": server.metric("num_preemptions_total"),
        "memory_bytes": [[round(at, 1), sizes] for at, sizes in load.memory],
        "wrong": dict(load.wrong),
    }
    if RECORD:
        Path(RECORD).write_text(json.dumps(figures, indent=2) + "\n")

    assert not load.wrong, load.wrong
    assert load.answered > CLIENTS and load.hung_up > CLIENTS / 10
    assert figures["preemptions"], "the pool was never too small"
    server.await_idle(30)
    assert len(server.processes()) == before[1]
    assert front.num_fds() <= before[0] + 4
    steady = [sizes for at, sizes in load.memory if at > WARM_SHARE * SECONDS]
    for name, first in steady[0].items():
        grown = steady[-1][name] - first
        assert grown < GROWTH_BYTES, f"{name} grew by {grown / 2**20:.1f} MiB"
    again = asyncio.run(stream(server.port, "/v1/completions", an_ask(random.Random(0))[0]))
    assert again.text == warm_up[0].text
