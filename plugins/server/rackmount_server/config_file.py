"""Options from a file: YAML, with the names that the command line has."""

from pathlib import Path
from typing import Any

import typer
import yaml

from rackmount_registry.errors import ConfigError, did_you_mean


def read_options(ctx: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager option: what the file holds stands where the command line says nothing.

    Raises:
        ConfigError: no mapping, or a name that is no option.
    """
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold options, each as `name: value`")
    legal = _names(ctx)
    chosen: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in legal:
            hint = did_you_mean(name, legal)
            raise ConfigError(f"--config {path} names {key!r}{hint}, which is no option")
        parameter, inverted = legal[name]
        if parameter in chosen:
            raise ConfigError(f"--config {path} gives {parameter} under two names")
        if inverted and not isinstance(value, bool):
            raise ConfigError(f"--config {path}: {key}={value!r} must be true or false")
        chosen[parameter] = not value if inverted else value
    ctx.default_map = chosen
    return path


def _names(ctx: typer.Context) -> dict[str, tuple[str, bool]]:
    """Every name of every parameter, without its dashes: the parameter's own, and whether the name
    says the opposite."""
    names: dict[str, tuple[str, bool]] = {}
    for it in ctx.command.params:
        own = str(it.name)
        names[own.replace("_", "-")] = own, False
        names |= {name.lstrip("-"): (own, False) for name in it.opts if name.startswith("--")}
        names |= {name.lstrip("-"): (own, True) for name in it.secondary_opts}
    return {name: entry for name, entry in names.items() if entry[0] not in ("config", "help")}
