"""`rackmount run`: answers a prompt, line after line, or a conversation."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rackmount.cli.options import AsJson, EngineOptions, Model, SamplingOptions, unfold
from rackmount.cli.progress import progress
from rackmount.sampling.params import SamplingParams
from rackmount.text.prompts import Prompt
from rackmount_registry.errors import ConfigError, RequestError

if TYPE_CHECKING:  # they import PyTorch, for which `--help` need not wait
    from rackmount import Engine, ExpertLoad
    from rackmount.cli.answer import Answer


@unfold
def run(
    ctx: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Without it: each line of stdin, until /exit.", show_default=False),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Hold a conversation, by the model's chat template; the default where there is "
            "a template and no PROMPT.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message of the conversation.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    expert_load: Annotated[
        bool, typer.Option("--expert-load", help="Say at the end how busy the experts were.")
    ] = False,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Answer PROMPT, or what is typed."""
    from rackmount import Engine, startup_report

    if chat is None and prompt is not None:
        chat = False
    if system is not None and chat is False:
        raise typer.BadParameter("a system message needs --chat", param_hint="--system")
    if engine.load_format == "dummy":
        raise ConfigError(
            "load_format='dummy': random weights have no tokenizer and answer in token ids alone; "
            "give rackmount.Engine lists of them in Python"
        )
    given = sampling.given()
    SamplingParams(**given)  # a bad value is to end here, not after minutes of loading
    with progress() as report:
        mounted = Engine(model, manager=ctx.obj, report=report, **engine.arguments())
    with mounted:
        if expert_load and not mounted.core.expert_layers:
            raise ConfigError(f"--expert-load: {model} has no experts")
        template = getattr(mounted.tokenizer, "chat_template", None)
        if template is None and (chat or system is not None):
            raise ConfigError(f"{model} has no chat template: leave out --chat and --system")
        typer.echo("\n".join(startup_report(mounted.rack, mounted.core, mounted.manager)), err=True)
        params = replace(mounted.default_sampling_params, **given)
        chat = template is not None if chat is None else chat
        messages = [] if system is None else [{"role": "system", "content": system}]
        lines = _typed(as_json) if prompt is None else [prompt]
        _converse(mounted, lines, params, messages if chat else None, as_json, prompt is not None)
        if expert_load:
            typer.echo("\n".join(_table(mounted.expert_load())), err=True)


def _converse(
    engine: "Engine",
    lines: Iterable[str],
    params: SamplingParams,
    messages: list[dict[str, str]] | None,
    as_json: bool,
    is_alone: bool,
) -> None:
    """Answers each line, behind the messages before it where there is a conversation. What fails of
    one that stands alone fails the command."""
    for line in lines:
        asked = None if messages is None else [*messages, {"role": "user", "content": line}]
        try:
            said = _answer(engine, asked or line, params, as_json)
        except RequestError as error:
            if is_alone:
                raise
            if as_json:  # a line for each line
                typer.echo(json.dumps({"error": str(error)}, ensure_ascii=False))
            typer.echo(f"error: {error}", err=True)
            continue
        if asked is not None:
            messages = [*asked, {"role": "assistant", "content": said.text}]
        if is_alone and said.finish_reason == "error":
            raise typer.Exit(1)


def _answer(engine: "Engine", prompt: Prompt, params: SamplingParams, as_json: bool) -> "Answer":
    """Prints an answer, then its figures."""
    from rackmount.cli.answer import answer

    said = answer(engine, prompt, params, _discard if as_json else _write)
    typer.echo(json.dumps(said.as_plain(), ensure_ascii=False) if as_json else "")
    typer.echo(str(said), err=True)
    return said


def _table(layers: "list[ExpertLoad]") -> Iterator[str]:
    """A line for each layer, between a line that names the columns and one about the last layer."""
    width = max(len(each.layer) for each in layers)
    yield f"{'experts':<{width}} {'choices':>9} {'used':>9} {'max/mean':>9}  busiest expert (share)"
    for each in layers:
        total, used = int(each.tokens.sum()), f"{each.num_used}/{each.tokens.size}"
        share = each.tokens[each.busiest] / max(total, 1)
        figures = f"{total:>9} {used:>9} {each.imbalance:>9.2f}  {each.busiest} ({share:.1%})"
        yield f"{each.layer:<{width}} {figures}"
    yield "in the model's last layer, only tokens that are sampled from count"


def _typed(as_json: bool) -> Iterator[str]:
    """Lines of stdin that are not blank, up to its end or /exit."""
    by_hand = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if by_hand:
        with suppress(ImportError):  # absent on Windows, where the console itself edits lines
            import readline  # noqa: F401  # gives `input` editing and history
    while True:
        try:
            line = input("> " if by_hand else "")
        except EOFError:
            return
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(text: str) -> None:
    """For answers that are printed whole."""
