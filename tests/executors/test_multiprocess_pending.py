"""Answers that are on their way while the next request is carried out."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.executors import ask, await_end, belongings, pids, toys

from rackmount_registry.executor import RankError

LONG_S = 0.4
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    executor = toys(2)
    yield executor
    executor.close()


def test_the_next_request_begins_while_an_answer_is_pending(two: Any) -> None:
    two.submit([None, "later", [LONG_S, "now", None]])
    two.submit([None, "now", None])
    first, second = two.collect(), two.collect()
    assert second < first - LONG_S / 2  # begun before the first was there, given after it


def test_pending_answers_of_all_ranks_come_to_a_call(two: Any) -> None:
    assert two.call([None, "later", [0.05, "sum", [1.0]]]) == [[2.0]] * 2


def test_an_answer_is_sent_as_soon_as_it_is_there_though_no_request_comes(two: Any) -> None:
    two.submit([None, "later", [0.01, "now", None]])
    assert time.monotonic() - two.collect() < LONG_S


@pytest.mark.parametrize("spin_s", [0.0, 0.3])
def test_waiting_for_a_pending_answer_takes_little_of_a_core_but_for_the_spin(
    spin_s: float,
) -> None:
    executor = toys(1, spin_s=spin_s)
    ask(executor, [None, "later", [0.01, "now", None]])
    before = ask(executor, [None, "cpu_time", None])
    executor.submit([None, "later", [1.0, "cpu_time", None]])
    spent = executor.collect() - before
    executor.close()
    assert spent < spin_s + 0.4


def test_an_answer_too_large_for_its_line_blocks_no_request_too_large_for_the_ring(
    two: Any,
) -> None:
    size = 4_000_000
    two.submit([0, "text", size])
    two.submit([None, "echo", "y" * size])
    assert two.collect() == "x" * size
    assert two.collect()[3] == "y" * size


def test_what_is_forgotten_is_not_taken_for_the_next(two: Any) -> None:
    two.submit([None, "later", [0.1, "text", 1]])
    two.submit([None, "text", 2])
    two.forget()
    assert ask(two, [None, "text", 3]) == "xxx"
    two.submit([None, "text", 4])
    two.submit([None, "text", 5])
    assert two.collect() == "xxxx"
    two.forget()
    assert two.call([None, "text", 6]) == ["x" * 6] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_pending_answer_is_told_as_any_other(rank: int) -> None:
    before = belongings()
    executor = toys(2)
    executor.submit([rank, "later", [0.1, "fail", "the cause"]])
    executor.submit([None, "text", 1])
    with pytest.raises(RankError, match=rf"^rank {rank}: ZeroDivisionError: the cause\n") as caught:
        for _ in range(20):  # rank 0 may answer before it is heard
            executor.collect()
            executor.submit([0, "later", [0.1, "text", 1]])
    assert caught.value.rank == rank
    with pytest.raises(RankError, match="all ranks have ended"):
        executor.submit([None, "text", 1])
    assert belongings() == before


def test_a_rank_that_is_killed_while_its_answer_is_pending_is_named() -> None:
    executor = toys(2)
    executor.submit([None, "later", [NEVER_S, "text", 1]])
    os.kill(pids(executor)[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL$"):
        executor.collect()


def test_closing_waits_for_no_answer(tmp_path: Path) -> None:
    before = belongings()
    executor = toys(2, str(tmp_path))
    executor.submit([None, "later", [NEVER_S, "text", 1]])
    started = pids(executor)
    begin = time.monotonic()
    executor.close()
    assert time.monotonic() - begin < 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed 0", "closed 1"]
    assert all(map(await_end, started))
    assert belongings() == before
