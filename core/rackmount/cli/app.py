"""The program: the commands of all plugins, of which only the chosen one is imported."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from rackmount_registry.descriptors import CliCommand
from rackmount_registry.errors import RackmountError
from rackmount_registry.offers import Offer
from rackmount_registry.plugins import PluginManager

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # its help cuts long options short, and costs 0.2 s to import
}
"""How every command of the program is made."""


class PluginGroup(TyperGroup):
    """Lists commands by their descriptors and imports one when it is called.

    Errors that users can cause end as one line on stderr and exit code 2; any other is a mistake
    of the program and shows where it arose.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, *rest = args
        if isinstance(self.commands.get(name), TyperGroup):
            return super().resolve_command(ctx, args)
        wanted = name if ctx.parent is None else f"{self.name} {name}"
        return name, _load(ctx.obj.find(CliCommand, wanted)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RackmountError as error:
            if ctx.find_root().params["traceback"]:
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


def build_app(manager: PluginManager) -> typer.Typer:
    """The program with the commands that `manager` offers; commands find it as `Context.obj`."""
    app = typer.Typer(
        name="rackmount",
        cls=PluginGroup,
        callback=_root,
        help="A plugin-based runtime for mixture-of-experts and quantized language models.",
        epilog=_broken(manager),
        context_settings={"obj": manager},
        no_args_is_help=True,
        **PLAIN,
    )
    groups: dict[str | None, typer.Typer] = {None: app}
    for offer in manager.offers(CliCommand):
        part = offer.descriptor
        if part.group not in groups:
            groups[part.group] = typer.Typer(cls=PluginGroup, no_args_is_help=True, **PLAIN)
            app.add_typer(groups[part.group], name=part.group, help="a group of commands")
        groups[part.group].command(part.name, help=part.summary)(_listed)
    return app


def main() -> None:
    """The entry point of `rackmount`."""
    build_app(PluginManager.discover())()


def _root(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the code an error arose.")
    ] = False,
) -> None:
    """Options of the program itself."""


def _listed() -> None:
    """Stands for a command in the list; `PluginGroup` puts the command itself in its place."""


def _load(offer: Offer[CliCommand]) -> Any:
    """The command, imported."""
    factory: typer.Typer | Callable[..., Any] = offer.load()
    if isinstance(factory, typer.Typer):
        return get_command(factory)
    app = typer.Typer(**PLAIN)
    app.command(offer.descriptor.name)(factory)
    return get_command(app)


def _broken(manager: PluginManager) -> str | None:
    if not manager.broken:
        return None
    return f"Plugins that could not be loaded: {len(manager.broken)}; see `rackmount plugins`."


if __name__ == "__main__":
    main()
