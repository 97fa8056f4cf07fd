"""One rank in this process: the program is called directly, and nothing is encoded."""

from typing import Any

from rackmount_registry.axes import Solo
from rackmount_registry.executor import Launch, Program, Seat
from rackmount_registry.offers import import_attribute


class InProcessExecutor:
    """A `rackmount_registry.executor.Executor`. A step that raises leaves it usable."""

    def __init__(self, launch: Launch) -> None:
        seat = Seat(rank=0, num_ranks=1, device=launch.device, group=Solo())
        factory = import_attribute(launch.program, "the program of the ranks")
        self._program: Program = factory(seat, launch.payload, launch.live)

    def call(self, request: Any) -> list[Any]:
        return [self._program.answer(request)]

    def step(self, request: Any) -> Any:
        return self._program.answer(request)

    def close(self) -> None:
        self._program.close()
