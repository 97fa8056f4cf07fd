"""The multiprocess executor with programs that hold no model: what ranks do while all is well."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.executors import ask, belongings, pids, toys

from rackmount_executors.multiprocess import MultiprocessExecutor
from rackmount_executors.options import MultiprocessOptions
from rackmount_registry.errors import ConfigError
from rackmount_registry.executor import Launch, RankError


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    executor = toys(3)
    yield executor
    executor.close()


def test_every_rank_answers_a_call_in_rank_order_and_rank_0_a_step(three: Any) -> None:
    assert three.call([None, "echo", "x"]) == [[rank, 3, "cpu", "x"] for rank in range(3)]
    assert ask(three, [None, "echo", "y"]) == [0, 3, "cpu", "y"]


def test_a_message_of_many_slots_arrives_whole(three: Any) -> None:
    text = "abcdefg" * 300_000
    assert [answer[3] for answer in three.call([None, "echo", text])] == [text] * 3


def test_collectives_sum_and_join_in_rank_order(three: Any) -> None:
    assert three.call([None, "sum", [1.0, 2.0]]) == [[3.0, 6.0]] * 3
    joined = [[0.0, 10.0, 1.0, 11.0, 2.0, 12.0]]
    assert three.call([None, "gather", [[0, 10]]]) == [joined] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_sum_has_the_same_bits_on_every_rank(dtype: str, three: Any) -> None:
    first, *others = three.call([None, "bits", dtype])
    assert others == [first] * 2
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    assert torch.tensor(first) == pytest.approx(torch.stack(parts).double().sum(0), abs=0.1)


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(three: Any) -> None:
    receive, waits = three._crew.receive, []

    def interrupted(timeout_s: float) -> Any:
        three._crew.receive = receive
        waits.append(timeout_s)
        raise KeyboardInterrupt

    three._crew.receive = interrupted
    with pytest.raises(KeyboardInterrupt):
        ask(three, [None, "sleep", 0.1])
    three.forget()
    assert ask(three, [None, "echo", 1]) == [0, 3, "cpu", 1]
    assert waits


def test_ranks_inherit_no_pipe_of_each_other(three: Any) -> None:
    """Else one that dies would keep the lines of others open."""
    files = three.call([None, "files", None])
    lines = [{name for name in listed if name.startswith(("pipe", "socket"))} for listed in files]
    own = [each - (lines[0] & lines[1] & lines[2]) for each in lines]
    assert all(len(each) > 2 for each in own)
    assert sum(map(len, own)) == len(set().union(*own))


def test_closing_ends_programs_in_order_and_leaves_nothing(tmp_path: Path) -> None:
    before = belongings()
    executor = toys(2, str(tmp_path))
    assert len(set(pids(executor))) == 2
    executor.close()
    executor.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed 0", "closed 1"]
    assert belongings() == before
    with pytest.raises(RankError, match="all ranks have ended"):
        ask(executor, [None, "echo", 1])


def test_more_ranks_than_gpus_are_refused_with_both_numbers() -> None:
    launch = Launch(program="m:f", codec="m:f", payload=None, num_ranks=2, device="cuda")
    with pytest.raises(ConfigError, match="2 ranks need a GPU each, and 0 are here"):
        MultiprocessExecutor(launch, options=MultiprocessOptions())


@pytest.mark.parametrize("name", ["start_timeout_s", "silence_timeout_s"])
def test_an_option_below_its_least_value_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=0.0 must be at least"):
        MultiprocessOptions(**{name: 0.0})
