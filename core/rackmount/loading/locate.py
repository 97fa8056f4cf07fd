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
from rackmount_registry.offers import Offer
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
    files = [path] if path.is_file() else sorted(path.iterdir())
    readers = manager.offers(CheckpointReader)
    matching = [
        reader
        for reader in readers
        if any(fnmatch.fnmatch(f.name, p) for f in files for p in reader.descriptor.patterns)
    ]
    if len(matching) != 1:
        patterns = ", ".join(p for reader in readers for p in reader.descriptor.patterns)
        found = (
            f"files of several formats ({', '.join(r.name for r in matching)}); name one file"
            if matching
            else f"no file that a mounted reader takes ({patterns})"
        )
        raise CheckpointError(f"{path} holds {found}")
    return cast(Checkpoint, matching[0].load()(_file_or_folder(path, matching[0])))


def _file_or_folder(path: Path, reader: Offer[CheckpointReader]) -> Path:
    """A folder with a config.json is opened as one; else the one file in it."""
    if path.is_file() or (path / "config.json").exists():
        return path
    files = [
        f
        for f in path.iterdir()
        if any(fnmatch.fnmatch(f.name, p) for p in reader.descriptor.patterns)
    ]
    if len(files) != 1:
        raise CheckpointError(
            f"{path} has no config.json and {len(files)} model files "
            f"({', '.join(sorted(f.name for f in files))}); name one file"
        )
    return files[0]
