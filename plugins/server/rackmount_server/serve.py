"""`rackmount serve`: an OpenAI-compatible server."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rackmount import EngineOptions, Model, progress, unfold
from rackmount_registry.errors import ConfigError
from rackmount_server.config_file import read_options

if TYPE_CHECKING:
    from rackmount import AsyncEngine
    from rackmount_server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Fields of `ServerSettings` that are given as they are."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    max_queued_requests: Annotated[
        int, typer.Option(min=1, help="Most answers that wait; 429 beyond.")
    ] = 1024
    max_waiting_tokens: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens that wait; 429 beyond.")
    ] = 2**20
    max_logprobs: Annotated[int, typer.Option(min=0, help="Most that a request may ask for.")] = 20
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request; 413 beyond.")] = (
        16 * 2**20
    )
    expert_metrics: Annotated[
        bool, typer.Option("--expert-metrics", help="Count every expert's tokens at /metrics.")
    ] = False
    drain_s: Annotated[
        float, typer.Option("--drain-seconds", min=0, help="For open answers, once told to stop.")
    ] = 30.0


@unfold
def serve(
    ctx: typer.Context,
    model: Model,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of these options; the command line goes before it.",
            is_eager=True,
            callback=read_options,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys that open every route but /health, a line each.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Instead of MODEL, in requests; repeatable.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a template, instead of the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of requests without a seed.")] = 0,
    *,
    server: ServerOptions,
    engine: EngineOptions,
) -> None:
    """Answer requests over HTTP as OpenAI does, until SIGINT or SIGTERM.

    Prints the address on stdout once it answers. A first signal lets open answers end, a second
    does not.
    """
    from rackmount_server.process import serve as run
    from rackmount_server.settings import ServerSettings

    settings = ServerSettings(
        model_names=tuple(served_model_name or (model,)),
        api_keys=_keys(api_key_file),
        chat_template=None if chat_template is None else _read(chat_template, "--chat-template"),
        **asdict(server),
    )
    _warn(settings)

    async def start() -> "AsyncEngine":
        from rackmount import AsyncEngine

        arguments: dict[str, Any] = engine.arguments() | {"seed": seed}
        with progress() as report:
            return await AsyncEngine.start(model, manager=ctx.obj, report=report, **arguments)

    raise typer.Exit(run(settings, start, _announce))


def _announce(engine: "AsyncEngine", address: str) -> None:
    typer.echo("\n".join(engine.description["report"]), err=True)
    typer.echo(f"serving at {address}")


def _warn(settings: "ServerSettings") -> None:
    if settings.is_local:
        return
    reach = f"warning: host {settings.host} may be reached from other machines"
    open_to = "" if settings.api_keys else ", and without --api-key-file anyone there may use it"
    typer.echo(reach + open_to, err=True)


def _keys(path: Path | None) -> tuple[str, ...]:
    """Of a file; lines that are blank or start with # hold none."""
    if path is None:
        return ()
    lines = [line.strip() for line in _read(path, "--api-key-file").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; it needs a line with one")
    return keys


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from error
