"""Answers that are on their way while the next request is carried out."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.executors import Later, Toy, ask, await_end, belongings, pids, toys

from rackmount.executors.answers import Answers, attempt
from rackmount_registry.axes import Solo
from rackmount_registry.executor import Pending, RankError, Seat

ROOT = Path(__file__).parents[2]
LONG_S = 0.4
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    executor = toys(2)
    yield executor
    executor.close()


def test_answers_come_in_the_order_of_their_requests_pending_or_not() -> None:
    program = Toy(Seat(rank=0, num_ranks=1, device="cpu", group=Solo()), None, None)
    answers = Answers()
    for request in (
        [0, "later", [0.05, "text", 1]],
        [0, "text", 2],
        [0, "fail", "now"],
        [0, "later", [0.0, "fail", "later"]],
        [0, "text", 3],
    ):
        answers.put(attempt(program, request))
    assert not answers.ready()
    assert answers.take() == "x"
    assert answers.ready()
    assert answers.take() == "xx"
    for why in ("now", "later"):
        with pytest.raises(ZeroDivisionError, match=why):
            answers.take()
    assert answers and answers.take() == "xxx" and not answers
    answers.put(program.answer([0, "later", [NEVER_S, "text", 1]]))
    answers.forget()
    assert not answers


def test_an_interrupt_is_no_answer() -> None:
    class Interrupted(Toy):
        def answer(self, request: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(Interrupted(Seat(rank=0, num_ranks=1, device="cpu", group=Solo()), 0, None), 1)


def test_plain_answers_are_not_taken_for_pending_ones() -> None:
    assert isinstance(Later(0.0, list), Pending)
    assert not any(isinstance(each, Pending) for each in (None, [], {"result": 1}, "ready"))


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


SCRIPT = """
from tests.helpers.executors import ask
from rackmount.executors.external import ExternalExecutor
from rackmount_registry.executor import Launch
executor = ExternalExecutor(Launch(
    program="tests.helpers.executors:Toy", codec="tests.helpers.executors:JsonCodec",
    payload=None, num_ranks=2, device="cpu",
))
{use}
executor.close()
print("closed")
"""


def launched(use: str) -> subprocess.CompletedProcess[str]:
    """Two ranks under torchrun."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--standalone", "--no-python", sys.executable, "-c", SCRIPT.format(use=use)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_ranks_of_a_launcher_begin_the_next_request_while_an_answer_is_pending() -> None:
    done = launched(
        "executor.submit([None, 'later', [0.5, 'sum', [1.0]]])\n"
        "executor.submit([None, 'now', None])\n"
        "assert executor.collect() == [2.0]\n"
        "executor.collect()\n"
        "assert executor.call([None, 'later', [0.1, 'sum', [3.0]]]) == [[6.0]] * 2\n"
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.slow
def test_a_rank_of_a_launcher_whose_pending_answer_fails_ends_all() -> None:
    done = launched(
        "executor.submit([1, 'later', [0.1, 'fail', 'the cause']])\nimport time; time.sleep(60)\n"
    )
    assert done.returncode == 1
    assert "ZeroDivisionError: the cause" in done.stderr
