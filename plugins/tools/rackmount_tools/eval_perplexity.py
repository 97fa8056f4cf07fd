"""`rackmount eval perplexity`: how well a model knows a text, in one number. `perplexity` has its
exact definition."""

import hashlib
import time
from pathlib import Path
from typing import Annotated

import typer

from rackmount import Engine, EngineOptions, Model, progress, startup_report, unfold
from rackmount_registry.errors import ConfigError
from rackmount_tools.perplexity import measure_perplexity
from rackmount_tools.record import JsonFile, describe_engine, write_record

DataFile = Annotated[Path, typer.Option(help="File of text in UTF-8.", show_default=False)]
MaxTokens = Annotated[
    int | None, typer.Option(min=2, help="First tokens of the text to take; all of them else.")
]


def read_text(file: Path) -> str:
    """The whole file.

    Raises:
        ConfigError: there is none, or it is no text in UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data={str(file)!r} must be a file of text in UTF-8: {error}") from error


@unfold
def evaluate(
    ctx: typer.Context,
    model: Model,
    data: DataFile,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    stride: Annotated[int, typer.Option(min=1, help="From one window to the next.")] = 512,
    max_tokens: MaxTokens = None,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Perplexity of MODEL on a text: e to the mean of -log p over its tokens, each given those
    before it in a window."""
    text = read_text(data)
    arguments = engine.arguments() | {"enable_prefix_caching": False}
    if arguments["max_model_len"] is None:
        arguments["max_model_len"] = context + 1
    with (
        progress() as report,
        Engine(model, manager=ctx.obj, report=report, **arguments) as mounted,
    ):
        typer.echo("\n".join(startup_report(mounted.rack, mounted.core, ctx.obj)), err=True)
        start = time.perf_counter()
        found = measure_perplexity(
            mounted, text, context=context, stride=stride, max_tokens=max_tokens, report=report
        )
        figures = {
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "nats": found.nats,
            "tokens": found.num_tokens,
            "bytes": found.num_bytes,
            "seconds": time.perf_counter() - start,
        }
        record = {
            "engine": describe_engine(mounted),
            "data": {"file": data.name, "sha256": hashlib.sha256(text.encode()).hexdigest()},
            "context": context,
            "stride": stride,
            "max_tokens": max_tokens,
            **figures,
        }
    typer.echo(
        f"perplexity {found.perplexity:.4f}, {found.bits_per_byte:.4f} bits a byte "
        f"({found.num_tokens} tokens, {found.num_bytes} bytes)"
    )
    write_record(json_file, record)
