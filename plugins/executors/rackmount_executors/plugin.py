"""What this distribution offers: executors whose ranks are processes."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import Executor


@hookimpl
def executors() -> list[Executor]:
    return [
        Executor(
            name="multiprocess",
            factory="rackmount_executors.multiprocess:MultiprocessExecutor",
            options="rackmount_executors.options:MultiprocessOptions",
            summary="a process for each rank on this host",
            order=1,
        ),
        Executor(
            name="external",
            factory="rackmount_executors.external:ExternalExecutor",
            summary="processes that a launcher such as torchrun has started, on one host or more",
        ),
    ]
