"""The answers of a program that are on their way, in the order of its requests."""

from collections import deque
from typing import Any, NoReturn

from rackmount_registry.executor import Pending, Program


class Answers:
    """A queue of answers, pending or not."""

    def __init__(self) -> None:
        self._queue: deque[Pending] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def put(self, answer: Any) -> None:
        self._queue.append(answer if isinstance(answer, Pending) else Given(answer))

    def ready(self) -> bool:
        """Whether the oldest is there."""
        return self._queue[0].ready()

    def take(self) -> Any:
        """The oldest, once it is there. Raises what went wrong with it."""
        return self._queue.popleft().result()

    def forget(self) -> None:
        self._queue.clear()


class Given:
    """A `Pending` that is there."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def ready(self) -> bool:
        return True

    def result(self) -> Any:
        return self._answer


class Raised(Given):
    """One whose result is an exception."""

    def result(self) -> NoReturn:
        raise self._answer


def attempt(program: Program, request: Any) -> Any:
    """The program's answer, or what it raises as an answer. An interrupt is no answer."""
    try:
        return program.answer(request)
    except Exception as error:
        return Raised(error)
