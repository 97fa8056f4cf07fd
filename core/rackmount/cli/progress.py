"""Progress bars of downloading and loading."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from rackmount_registry.checkpoint import Report


@contextmanager
def progress() -> Iterator[Report]:
    """A `Report` that draws a bar for each stage on stderr, where that is a terminal.

    The bars vanish at the end.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
