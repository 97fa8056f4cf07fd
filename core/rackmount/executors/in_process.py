"""One rank in this process: the program is called directly, and nothing is encoded."""

from typing import Any

from rackmount_registry.answers import Answers, attempt
from rackmount_registry.axes import Solo
from rackmount_registry.executor import Launch, Program, Seat
from rackmount_registry.offers import import_attribute


class InProcessExecutor:
    """A `rackmount_registry.executor.Executor`. A request that raises leaves it usable."""

    def __init__(self, launch: Launch) -> None:
        seat = Seat(rank=0, num_ranks=1, device=launch.device, group=Solo())
        factory = import_attribute(launch.program, "the program of the ranks")
        self._program: Program = factory(seat, launch.payload, launch.live)
        self._answers = Answers()

    def call(self, request: Any) -> list[Any]:
        self.submit(request)
        return [self.collect()]

    def submit(self, request: Any) -> None:
        self._answers.put(attempt(self._program, request))

    def collect(self) -> Any:
        return self._answers.take()

    def forget(self) -> None:
        self._answers.forget()

    def close(self) -> None:
        self._answers.forget()
        self._program.close()
