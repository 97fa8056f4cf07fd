"""Answers that are on their way, in one process."""

from typing import Any

import pytest
from tests.helpers.executors import Later, Toy

from rackmount_registry.answers import Answers, attempt
from rackmount_registry.axes import Solo
from rackmount_registry.executor import Pending, Seat

NEVER_S = 3600.0


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
