"""Finding a model by its name, and the reader for what is found."""

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rackmount.loading.safetensors_reader import read_json
from rackmount_registry.checkpoint import Checkpoint, Report
from rackmount_registry.descriptors import CheckpointReader, ModelSource
from rackmount_registry.errors import CheckpointError, ConfigError, did_you_mean
from rackmount_registry.offers import Offer, broken_note
from rackmount_registry.plugins import PluginManager

MAX_HOPS = 4


def locate(
    model: str | Path, manager: PluginManager, report: Report, *, weights: bool = True
) -> Path:
    """A local path for an alias, a hub id, or a path; without `weights` the configuration may be
    all that it holds.

    Raises:
        ConfigError: no source knows the name.
        CheckpointError: the source cannot bring it.
    """
    name = str(model)
    for _ in range(MAX_HOPS):
        path = Path(name).expanduser()
        if path.exists():
            return path
        aliases = manager.claims(ModelSource)
        if name in aliases or ":" in name:
            offer = manager.claimed(ModelSource, name)
            target = offer.descriptor.aliases[name.rpartition(":")[2]]
        else:
            offer, target = _serving(name, manager, aliases), name
        if offer.descriptor.factory:
            return cast(Path, offer.load()(target, report, weights=weights))
        name = target
    raise ConfigError(f"model={str(model)!r} leads from alias to alias without an end")


def _serving(name: str, manager: PluginManager, aliases: list[str]) -> Offer[ModelSource]:
    """The source whose pattern takes `name`."""
    for offer in manager.offers(ModelSource):
        if offer.descriptor.serves and re.fullmatch(offer.descriptor.serves, name):
            return offer
    raise ConfigError(
        f"model={name!r} is neither a path that exists, nor a hub id (owner/name), nor an alias"
        f"{did_you_mean(name, aliases)}; aliases: {', '.join(aliases)}"
    )


def read_config(path: Path, manager: PluginManager) -> Mapping[str, Any]:
    """The config.json of `path`: a folder that need not hold weights, the file itself, or a model
    file with its configuration inside.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.exists():
        return read_json(file)
    checkpoint = open_checkpoint(path, manager)
    try:
        return checkpoint.config
    finally:
        checkpoint.close()


def open_checkpoint(path: Path, manager: PluginManager) -> Checkpoint:
    """Opens `path`, a folder or file, with the reader whose file patterns it matches.

    Raises:
        CheckpointError: no reader matches, or several do.
    """
    readers = manager.offers(CheckpointReader)
    taken = {reader.name: _files_of(reader, path) for reader in readers}
    matching = [reader for reader in readers if taken[reader.name]]
    if not matching:
        patterns = ", ".join(p for reader in readers for p in reader.descriptor.patterns)
        raise CheckpointError(
            f"{path} holds no file that a mounted reader takes ({patterns or 'none is mounted'})"
            f"{broken_note(manager.broken)}"
        )
    if len(matching) > 1:
        names = ", ".join(reader.name for reader in matching)
        raise CheckpointError(f"{path} holds files of several formats ({names}); name one file")
    files = taken[matching[0].name]
    if path.is_dir() and not (path / "config.json").exists():
        if len(files) != 1:
            listed = ", ".join(file.name for file in files)
            raise CheckpointError(
                f"{path} has no config.json and {len(files)} model files ({listed}); name one file"
            )
        path = files[0]
    return cast(Checkpoint, matching[0].load()(path))


def _files_of(reader: Offer[CheckpointReader], path: Path) -> list[Path]:
    """Which files of a folder, or the file itself, a reader takes."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    patterns = reader.descriptor.patterns
    return [file for file in files if any(fnmatch.fnmatch(file.name, p) for p in patterns)]
