"""`rackmount plugins`: what is mounted, what is broken, which names are contested."""

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from rackmount.cli.options import AsJson
from rackmount_registry import API_VERSION
from rackmount_registry.offers import KINDS, by_claim, by_name, legal_names
from rackmount_registry.plain import as_plain
from rackmount_registry.plugins import PluginManager

WIDTH = 200
"""Columns of a table that no terminal limits."""


def plugins(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List every part that is mounted, and every plugin that could not be loaded."""
    content = inventory(ctx.obj)
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    columns = ("distribution", "version", "kind", "name", "band", "claims")
    table = Table(*columns, box=None)
    for part in content["parts"]:
        row = part | {"claims": ", ".join(part["claims"])}
        table.add_row(*(row.get(column, "") for column in columns))
    console.print(table)
    for plugin in content["broken"]:
        text = "broken: {distribution} {version}: {error}".format(**plugin)
        console.print(text, style="red", soft_wrap=True)
    for name in content["contested"]:
        console.print("contested: {kind} {name}".format(**name), style="yellow", soft_wrap=True)


def inventory(manager: PluginManager) -> dict[str, Any]:
    """All of it as JSON-ready values; a contested name stands as "dist:name", which chooses it."""
    offers = sorted(manager.offers(), key=lambda o: (o.distribution, o.descriptor.kind, o.name))
    return {
        "api_version": API_VERSION,
        "parts": [
            offer.as_plain() | {"claims": offer.claims, "summary": offer.descriptor.summary}
            for offer in offers
        ],
        "broken": as_plain(manager.broken),
        "contested": [
            {"kind": kind, "name": name}
            for kind in KINDS
            for keys in (by_name, by_claim)
            for name in legal_names(manager.offers(kind), keys)
            if ":" in name
        ],
    }
