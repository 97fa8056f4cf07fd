"""`rackmount eval perplexity`: how well a model knows a text, in one number. `perplexity` has its
exact definition."""

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rackmount import (
    Engine,
    EngineConfig,
    EngineOptions,
    Model,
    draft_rack,
    locate,
    progress,
    read_config,
    startup_report,
    unfold,
)
from rackmount_registry.checkpoint import Report
from rackmount_registry.errors import ConfigError
from rackmount_registry.plugins import PluginManager
from rackmount_tools.perplexity import DEFAULT_CONTEXT, measure_perplexity, require_stride
from rackmount_tools.record import JsonFile, describe_engine, write_record

DataFile = Annotated[Path, typer.Option(help="File of text in UTF-8.", show_default=False)]
MaxTokens = Annotated[
    int | None, typer.Option(min=2, help="First tokens of the text to take; all of them else.")
]

DEFAULT_STRIDE = 512
FEW_TOKENS = 1000
"""-log p differs by about 3 from token to token (SmolLM2 on a novel: 2.9 is its deviation), so that
its mean over so many is known to 0.1, and perplexity to a tenth."""
Context = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of a window.",
        show_default=f"{DEFAULT_CONTEXT}, or what the model has room for",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens from one window to the next.",
        show_default=f"{DEFAULT_STRIDE}, or what a smaller window has room for",
    ),
]


def read_text(file: Path) -> str:
    """The whole file.

    Raises:
        ConfigError: there is none, or it is empty or no text in UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data={str(file)!r} must be a file of text in UTF-8: {error}") from error
    if not text:
        raise ConfigError(f"data={str(file)!r} must be a file of text in UTF-8, and is empty")
    return text


def context_of(
    asked: int | None, model: str, arguments: dict[str, Any], manager: PluginManager, report: Report
) -> int:
    """Tokens of a window, as asked, or else `DEFAULT_CONTEXT` and no more than there is room for:
    the engine keeps a place for a token of output. Reads no weights.

    Raises:
        ConfigError: there is no room for what is asked.
    """
    config = EngineConfig.create(model=model, **arguments)
    path = locate(model, manager, report, weights=False)
    length = draft_rack(config, read_config(path, manager), manager).max_model_len
    if asked is not None and asked >= length:
        raise ConfigError(
            f"context={asked} must be at most {length - 1}: there is room for {length} tokens, and "
            "one of them is output; where the model knows more, max_model_len raises it"
        )
    return asked or min(DEFAULT_CONTEXT, length - 1)


def stride_of(asked: int | None, context: int) -> int:
    """From one window to the next, as asked, or else `DEFAULT_STRIDE` and no more than leaves a
    place for a token that begins the window.

    Raises:
        ConfigError: more than a window is asked for.
    """
    stride = asked or min(DEFAULT_STRIDE, context - 1)
    require_stride(stride, context)
    return stride


@unfold
def evaluate(
    ctx: typer.Context,
    model: Model,
    data: DataFile,
    context: Context = None,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Perplexity of MODEL on a text: e to the mean of -log p over its tokens, each given those
    before it in a window."""
    text = read_text(data)
    arguments = engine.arguments() | {"enable_prefix_caching": False}
    with progress() as report:
        context = context_of(context, model, arguments, ctx.obj, report)
    stride = stride_of(stride, context)
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
    if found.num_tokens < FEW_TOKENS:
        typer.echo(
            f"WARNING: perplexity over so few tokens, {found.num_tokens}, says little; give "
            f"{FEW_TOKENS} or more",
            err=True,
        )
    typer.echo(
        f"perplexity {found.perplexity:.4f}, {found.bits_per_byte:.4f} bits a byte "
        f"({found.num_tokens} tokens, {found.num_bytes} bytes)"
    )
    write_record(json_file, record)
