"""What this distribution offers: a command."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CliCommand


@hookimpl
def cli_commands() -> list[CliCommand]:
    return [
        CliCommand(
            name="serve",
            factory="rackmount_server.serve:serve",
            summary="answer requests over HTTP, as OpenAI does",
        )
    ]
