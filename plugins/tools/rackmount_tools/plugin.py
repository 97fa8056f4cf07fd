"""What this distribution offers: commands."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CliCommand


@hookimpl
def cli_commands() -> list[CliCommand]:
    return [
        CliCommand(
            name="scheduler",
            group="bench",
            factory="rackmount_tools.bench_scheduler:bench",
            summary="CPU time of a decode step without a model",
        )
    ]
