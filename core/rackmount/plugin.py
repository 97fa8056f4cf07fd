"""What the core itself offers, through the same door as everyone else."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CheckpointReader, CliCommand, Executor, ModelSource


@hookimpl
def checkpoint_readers() -> list[CheckpointReader]:
    return [
        CheckpointReader(
            name="safetensors",
            factory="rackmount.loading.safetensors_reader:open_checkpoint",
            patterns=("*.safetensors",),
        )
    ]


@hookimpl
def model_sources() -> list[ModelSource]:
    return [
        ModelSource(
            name="hub",
            factory="rackmount.loading.hub:fetch",
            serves=r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?",
            summary="the Hugging Face hub: owner/name or owner/name@revision",
        )
    ]


@hookimpl
def executors() -> list[Executor]:
    return [
        Executor(
            name="in-process",
            factory="rackmount.executors.in_process:InProcessExecutor",
            summary="one rank, in the process of the engine",
            max_ranks=1,
            order=0,
        ),
    ]


@hookimpl
def cli_commands() -> list[CliCommand]:
    return [
        CliCommand(name="run", factory="rackmount.cli.run:run", summary="answer a prompt, or chat"),
        CliCommand(
            name="plugins", factory="rackmount.cli.plugins:plugins", summary="what is mounted"
        ),
        CliCommand(
            name="explain",
            factory="rackmount.cli.explain:explain",
            summary="what would be mounted, and why",
        ),
    ]
