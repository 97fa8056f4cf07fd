"""An engine core, a rank or a front end that dies: all hear it in time, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import NUM_BYTE_IDS, byte_tokenizer, greedy
from tests.helpers.executors import await_end, belongings
from tests.helpers.null_executor import BREAKS_DEVICE, INTERRUPTS, null_plugin

from rackmount import AsyncEngine, EngineDead
from rackmount.engine.core import Event
from rackmount.serving import process
from rackmount.serving.answer import Answer

ROOT = Path(__file__).parents[2]
IN_TIME_S = 10
ROOM = {"num_kv_blocks": 2**14, "max_num_seqs": 8}
TP = ROOM | {"tp": 2}
LONG = greedy(100_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose answers may outlast a test."""
    made = tmp_path_factory.mktemp("model")
    tiny_checkpoint(made, "llama", vocab_size=NUM_BYTE_IDS, max_position_embeddings=2**17)
    byte_tokenizer().save_pretrained(made)
    return made


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go, for this test and what it starts; not pytest's own folder, since a
    socket's path may have 107 bytes."""
    for thread in threading.enumerate():
        if thread.name == "grammar":  # of the test before: what it imports is open in between
            thread.join()
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def family(engine: AsyncEngine) -> list[int]:
    """The core's process and its ranks'."""
    core = psutil.Process(engine.description["processes"]["core"])
    return [core.pid, *(each.pid for each in core.children(recursive=True))]


def kill_core(engine: AsyncEngine) -> None:
    os.kill(family(engine)[0], signal.SIGKILL)


def kill_rank(engine: AsyncEngine) -> None:
    os.kill(family(engine)[2], signal.SIGKILL)


def stop_core(engine: AsyncEngine) -> None:
    os.kill(family(engine)[0], signal.SIGSTOP)


async def check_fault(
    folder: Path, fault: Callable[[AsyncEngine], object], message: str, **arguments: Any
) -> None:
    """The fault with answers open: both hear of it in time, as does whoever comes later."""
    engine = await AsyncEngine.start(folder, **ROOM | arguments)
    processes = family(engine)
    answers = [engine.submit("A", LONG) for _ in range(2)]
    for answer in answers:
        await anext(answer)
    fault(engine)
    begin = time.monotonic()
    for answer in answers:
        with pytest.raises(EngineDead, match=message):
            await answer.output()
    assert time.monotonic() - begin < IN_TIME_S
    assert not engine.is_alive and not engine.num_unfinished
    with pytest.raises(EngineDead, match=message):
        engine.submit("A")
    with pytest.raises(EngineDead, match=message):
        await engine.reset_prefix_cache()
    await engine.close()
    assert all(map(await_end, processes))


def test_a_core_that_is_killed_is_named_in_time_and_nothing_is_left(
    folder: Path, temporary: Path
) -> None:
    before = belongings()
    asyncio.run(check_fault(folder, kill_core, "the engine core was killed by SIGKILL"))
    assert belongings() == before
    assert not list(temporary.iterdir())


def test_a_rank_that_is_killed_is_named_in_time_and_nothing_is_left(
    folder: Path, temporary: Path
) -> None:
    before = belongings()
    asyncio.run(check_fault(folder, kill_rank, r"rank 1 was killed by SIGKILL", **TP))
    assert belongings() == before
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_core_of_ranks_that_is_killed_takes_its_ranks_along(folder: Path) -> None:
    asyncio.run(check_fault(folder, kill_core, "the engine core was killed by SIGKILL", **TP))


@pytest.mark.slow
def test_a_core_that_is_stopped_is_noticed_in_time(folder: Path) -> None:
    asyncio.run(check_fault(folder, stop_core, "no sign of life for 8 s"))


@pytest.mark.parametrize("token_id", [BREAKS_DEVICE, INTERRUPTS])
def test_a_core_that_cannot_go_on_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_id: int
) -> None:
    monkeypatch.syspath_prepend(null_plugin(tmp_path))
    asked = []

    def ask(engine: AsyncEngine) -> None:
        asked.append(engine.submit([token_id], greedy()))

    asyncio.run(check_fault(folder, ask, "as the prompt asks", executor="null"))


def test_a_front_end_that_lags_hears_why_its_core_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason comes after all that is on its way."""
    monkeypatch.syspath_prepend(null_plugin(tmp_path))

    def lag(engine: AsyncEngine) -> None:
        deliver = engine._deliver

        def lagging(events: list[Event]) -> None:
            time.sleep(0.005)
            deliver(events)

        monkeypatch.setattr(engine, "_deliver", lagging)
        time.sleep(0.5)  # until the core has filled what lies between
        asked.append(engine.submit([BREAKS_DEVICE], greedy()))

    asked: list[Answer] = []
    asyncio.run(check_fault(folder, lag, "as the prompt asks", executor="null"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the engine core was killed by SIGKILL"),
        ("import sys; sys.exit(3)", "the engine core exited with 3"),
    ],
)
def test_a_process_that_never_becomes_a_core_ends_the_start(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    before = belongings()
    monkeypatch.setattr(process, "CODE", f"{code}  # {{path}} {{arguments}}")
    with pytest.raises(EngineDead, match=message):
        asyncio.run(AsyncEngine.start(folder))
    assert belongings() == before
    assert not list(temporary.iterdir())


def test_a_start_that_is_cancelled_leaves_nothing(folder: Path, temporary: Path) -> None:
    before = belongings()

    async def check() -> None:
        def cancel(*_: object) -> None:
            start.cancel()

        start = asyncio.create_task(AsyncEngine.start(folder, **ROOM, report=cancel))
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(check())
    assert belongings() == before
    assert not list(temporary.iterdir())


SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
import psutil
from tests.helpers.engines import greedy
from rackmount import AsyncEngine

def tell(): print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)

async def main():
    starting = asyncio.create_task(AsyncEngine.start({folder!r}, **{arguments}))
    {meanwhile}
    engine = await starting
    answer = engine.submit("A", greedy(100_000))
    await anext(answer)
    tell()
    {end}

asyncio.run(main())
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
EARLY = f"while not psutil.Process().children(): await asyncio.sleep(0)\n    tell(); {KILL}"
LATER = f"await asyncio.sleep(1)\n    tell(); {KILL}"
ENDS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "returns": ("", "", ROOM, 0),
    "raises": ("", "raise SystemExit(7)", ROOM, 7),
    "is killed": ("", KILL, ROOM, -signal.SIGKILL),
    "is killed with ranks": ("", KILL, TP, -signal.SIGKILL),
    "is killed at once": (EARLY, "", ROOM, -signal.SIGKILL),
    "is killed as it starts": (LATER, "", ROOM, -signal.SIGKILL),
    "leaves a fork": ("", f"os.fork() or os.execvp('sleep', ['sleep', '9'])\n    {KILL}", ROOM, -9),
}
"""How the front end ends: meanwhile, once it has a token, its arguments, and with which code."""

QUICK = ("is killed with ranks", "is killed at once")


@pytest.mark.parametrize(
    "end", [it if it in QUICK else pytest.param(it, marks=pytest.mark.slow) for it in ENDS]
)
def test_a_core_ends_with_its_front_end_however_that_ends(
    folder: Path, temporary: Path, end: str
) -> None:
    shared = set(Path("/dev/shm").iterdir())
    meanwhile, last, arguments, code = ENDS[end]
    text = SCRIPT.format(folder=str(folder), arguments=arguments, meanwhile=meanwhile, end=last)
    with (temporary / "out").open("w+") as out, (temporary / "err").open("w+") as err:
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=out,
            stderr=err,
            timeout=60,
        )
    assert done.returncode == code, (temporary / "err").read_text()
    started = [int(pid) for pid in (temporary / "out").read_text().split()]
    assert len(started) == (3 if arguments is TP else 1)
    assert all(map(await_end, started))
    assert (temporary / "err").read_text() == ""
    assert {path.name for path in temporary.iterdir()} == {"out", "err"}
    assert set(Path("/dev/shm").iterdir()) == shared


@pytest.mark.slow
def test_eight_start_at_once(folder: Path) -> None:
    async def check() -> None:
        engines = await asyncio.gather(
            *(AsyncEngine.start(folder, num_kv_blocks=64, max_model_len=64) for _ in range(8))
        )
        for engine in engines:
            assert len((await engine.submit("A", greedy(3)).output()).token_ids) == 3
        await asyncio.gather(*(engine.close() for engine in engines))

    asyncio.run(check())
