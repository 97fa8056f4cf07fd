"""Finding a model by its name, and the reader for what is found."""

import re
from collections.abc import Mapping
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from rackmount.loading.dummy import DummyCheckpoint
from rackmount.loading.safetensors_reader import read_configuration
from rackmount_registry.checkpoint import Checkpoint, Report
from rackmount_registry.descriptors import CheckpointReader, ModelSource
from rackmount_registry.errors import CheckpointError, ConfigError, did_you_mean
from rackmount_registry.offers import Offer, broken_note
from rackmount_registry.plugins import PluginManager

MAX_HOPS = 4


Hop = tuple[Offer[ModelSource], str]
"""A source, and what it makes of the name before."""


def locate(
    model: str | Path, manager: PluginManager, report: Report, *, weights: bool = True
) -> Path:
    """A local path for an alias, a hub id, or a path; without `weights` the configuration may be
    all that it holds.

    Raises:
        ConfigError, PluginError: no source knows the name, or several do.
        CheckpointError: the source cannot bring it.
    """
    hops = route(model, manager)
    source, target = hops[-1] if hops else (None, str(model))
    if source is None or not source.descriptor.factory:
        return Path(target).expanduser()
    return cast(Path, source.load()(target, report, weights=weights))


def route(model: str | Path, manager: PluginManager) -> list[Hop]:
    """From alias to alias, up to the source that fetches or to a path that exists; nothing for such
    a path itself.

    Raises:
        ConfigError, PluginError: as for `locate`.
    """
    name, hops = str(model), list[Hop]()
    while not Path(name).expanduser().exists():
        if len(hops) == MAX_HOPS:
            raise ConfigError(f"model={str(model)!r} leads from alias to alias without an end")
        source, name = _next(name, manager)
        hops.append((source, name))
        if source.descriptor.factory:
            break
    return hops


def _next(name: str, manager: PluginManager) -> Hop:
    """The source with this alias, else the first one whose pattern takes the name."""
    sources = manager.offers(ModelSource)
    if ":" in name or any(name in source.claims for source in sources):
        source = manager.claimed(ModelSource, name)
        return source, source.descriptor.aliases[name.rpartition(":")[2]]
    for source in sources:
        if serves(source.descriptor, name):
            return source, name
    aliases = manager.claims(ModelSource)
    raise ConfigError(
        f"model={name!r} is neither a path that exists, nor a hub id (owner/name), nor an alias"
        f"{did_you_mean(name, aliases)}; aliases: {', '.join(aliases) or 'none'}"
        f"{broken_note(manager.broken)}"
    )


def serves(source: ModelSource, name: str) -> bool:
    """Whether its pattern takes the name."""
    return source.serves is not None and re.fullmatch(source.serves, name) is not None


def read_config(path: Path, manager: PluginManager) -> Mapping[str, Any]:
    """The config.json of `path`: a folder that need not hold weights, the file itself, or a model
    file with its configuration inside.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.exists():
        return read_configuration(file)
    with closing(open_checkpoint(path, manager)) as checkpoint:
        return checkpoint.config


def open_model(path: Path, manager: PluginManager, load_format: str) -> Checkpoint:
    """The checkpoint at `path`; of the format "dummy" its configuration alone, and `path` may hold
    no more than that.

    Raises:
        CheckpointError: as for `open_checkpoint` and `read_config`.
    """
    if load_format == "dummy":
        return DummyCheckpoint(read_config(path, manager))
    return open_checkpoint(path, manager)


def _without_weights(path: Path) -> str:
    return "; load_format='dummy' needs its config.json alone" * (path / "config.json").is_file()


def open_checkpoint(path: Path, manager: PluginManager) -> Checkpoint:
    """Opens `path`, a folder or file, with the reader whose file patterns it matches.

    Raises:
        CheckpointError: no reader matches, or several do.
    """
    taken = files_by_reader(path, manager)
    matching = [(reader, files) for reader, files in taken if files]
    if not matching:
        patterns = ", ".join(p for reader, _ in taken for p in reader.descriptor.patterns)
        raise CheckpointError(
            f"{path} holds no file that a mounted reader takes ({patterns or 'none is mounted'})"
            f"{broken_note(manager.broken)}{_without_weights(path)}"
        )
    if len(matching) > 1:
        names = ", ".join(reader.name for reader, _ in matching)
        raise CheckpointError(f"{path} holds files of several formats ({names}); name one file")
    ((reader, files),) = matching
    if path.is_dir() and not (path / "config.json").exists():
        if len(files) != 1:
            listed = ", ".join(file.name for file in files)
            raise CheckpointError(
                f"{path} has no config.json and {len(files)} model files ({listed}); name one file"
            )
        path = files[0]
    return cast(Checkpoint, reader.load()(path))


def files_by_reader(
    path: Path, manager: PluginManager
) -> list[tuple[Offer[CheckpointReader], list[Path]]]:
    """Every reader with the files of a folder, or the file itself, that it takes."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [
        (
            reader,
            [f for f in files if any(fnmatch(f.name, p) for p in reader.descriptor.patterns)],
        )
        for reader in manager.offers(CheckpointReader)
    ]
