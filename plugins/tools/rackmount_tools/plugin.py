"""What this distribution offers: commands."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CliCommand

BENCHES = {
    "latency": "prefill and decode steps, beside the least time they could take",
    "throughput": "output tokens per second of many requests",
    "interference": "time between tokens while long prompts arrive",
    "startup": "from the start of a process to its first token",
    "kernels": "linear and expert kernels at the shapes of a model",
    "scheduler": "CPU time of a decode step without a model",
    "serve": "what clients see of a running server",
}


@hookimpl
def cli_commands() -> list[CliCommand]:
    return [
        CliCommand(
            name=name, group="bench", factory=f"rackmount_tools.bench_{name}:bench", summary=summary
        )
        for name, summary in BENCHES.items()
    ] + [
        CliCommand(
            name="perplexity",
            group="eval",
            factory="rackmount_tools.eval_perplexity:evaluate",
            summary="how well a model knows a text",
        ),
        CliCommand(
            name="calibrate",
            factory="rackmount_tools.calibrate:calibrate",
            summary="scales of an FP8 KV cache, and rounded weights, as a checkpoint",
        ),
    ]
