"""Ranks that fail, die, stop or never come: the caller hears which, and nothing is left."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.executors import ask, await_end, belongings, pids, toys

from rackmount_executors import crew
from rackmount_registry.executor import RankError

ROOT = Path(__file__).parents[2]
IN_TIME_S = 10


def assert_refuses(executor: Any) -> None:
    with pytest.raises(RankError, match="all ranks have ended"):
        ask(executor, [None, "echo", 1])


def raises(executor: Any) -> None:
    with pytest.raises(RankError, match=r"^rank 1: ZeroDivisionError: the cause\n") as caught:
        ask(executor, [None, "fail_all", 1])
    assert caught.value.rank == 1
    assert "in fail_all\n" in caught.value.traceback
    assert "in fail_all\n" in caught.value.__notes__[0]


def is_killed(executor: Any) -> None:
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL$") as caught:
        ask(executor, [1, "kill", "SIGKILL"])
        ask(executor, [None, "sum", [1.0]])
    assert caught.value.rank == 1


def is_killed_in_a_collective(executor: Any) -> None:
    os.kill(pids(executor)[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL$"):
        ask(executor, [None, "sum", [1.0]])


def is_killed_between_steps(executor: Any) -> None:
    os.kill(pids(executor)[1], signal.SIGKILL)
    assert await_end(pids(executor)[1])
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL$"):
        ask(executor, [None, "sum", [1.0]])


def exits(executor: Any) -> None:
    with pytest.raises(RankError, match=r"^rank 1 exited with 3$"):
        ask(executor, [1, "exit", 3])
        ask(executor, [None, "sum", [1.0]])


def is_stopped(executor: Any) -> None:
    os.kill(pids(executor)[1], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"^rank 1 .* has given no sign of life for") as caught:
        ask(executor, [None, "sum", [1.0]])
    assert caught.value.rank == 1


FAULTS: dict[str, Callable[[Any], None]] = {
    fault.__name__: fault
    for fault in (
        raises,
        is_killed,
        is_killed_in_a_collective,
        is_killed_between_steps,
        exits,
        is_stopped,
    )
}


def check_fault(name: str, **options: Any) -> None:
    before = belongings()
    executor = toys(2, **options)
    started = pids(executor)
    begin = time.monotonic()
    FAULTS[name](executor)
    assert time.monotonic() - begin < IN_TIME_S
    assert_refuses(executor)
    executor.close()
    assert all(map(await_end, started))
    assert belongings() == before


@pytest.mark.parametrize("name", ["raises", "is_killed_between_steps", "is_stopped"])
def test_a_rank_that_fails_is_named_in_time_and_nothing_is_left(name: str) -> None:
    check_fault(name, silence_timeout_s=4.0)


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_in_time_by_default() -> None:
    check_fault("is_stopped")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_leaves_anything_in_20_rounds(name: str) -> None:
    before = belongings()
    for _ in range(20):
        check_fault(name, silence_timeout_s=4.0)
    assert belongings() == before


def test_a_program_that_cannot_be_built_in_a_rank_is_told_with_its_traceback() -> None:
    before = belongings()
    with pytest.raises(RankError, match=r"^rank 1: ValueError: not in this rank\n") as caught:
        toys(2, ["raise", 1])
    assert "in __init__\n" in caught.value.traceback
    assert belongings() == before


def test_a_rank_that_never_comes_is_named_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, command, asked = belongings(), crew.command, []

    def second_never(fds: tuple[int, ...]) -> list[str]:
        asked.append(fds)
        return ["sleep", "60"] if len(asked) == 2 else command(fds)

    monkeypatch.setattr(crew, "command", second_never)
    with pytest.raises(RankError, match=r"^rank 1 of 2 did not come within 6.0 s, the start_tim"):
        toys(2, start_timeout_s=6.0)
    assert belongings() == before


def test_ranks_end_when_their_executor_is_garbage() -> None:
    before = belongings()
    executor = toys(2)
    started = pids(executor)
    del executor
    gc.collect()
    assert all(map(await_end, started))
    assert belongings() == before


SCRIPT = """
import os, signal, sys, time
from tests.helpers.executors import ask, pids, toys
executor = toys(2)
print(*pids(executor), flush=True)
{end}
"""
ENDS = {
    "ends": ("", 0),
    "raises": ("raise SystemExit(7)", 7),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "is killed in a step": (
        "import threading\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "ask(executor, [None, 'sleep', 60])",
        -signal.SIGKILL,
    ),
    "ends in a fork first": (
        "pid = os.fork()\nif not pid: sys.exit(0)\nos.waitpid(pid, 0)\n"
        "assert ask(executor, [None, 'echo', 1])",
        0,
    ),
}
"""How the driver ends, and with which code. None of them guards its main module."""


def check_driver(end: str) -> None:
    shared = set(Path("/dev/shm").iterdir())
    code, expected = ENDS[end]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=code)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (expected, "")
    started = [int(pid) for pid in done.stdout.split()]
    assert len(started) == 2
    assert all(map(await_end, started))
    assert set(Path("/dev/shm").iterdir()) == shared


@pytest.mark.parametrize("end", ["ends", "is killed in a step"])
def test_ranks_end_with_their_driver_in_silence(end: str) -> None:
    check_driver(end)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_ranks_end_with_their_driver_however_it_ends_in_5_rounds(end: str) -> None:
    for _ in range(5):
        check_driver(end)
