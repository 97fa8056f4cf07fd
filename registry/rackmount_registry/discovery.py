"""From an entry point to checked descriptors: one plugin at a time, around pluggy.

Everything that a plugin can get wrong ends as a `PluginError` that names the hook and what it
expects.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution
from types import ModuleType

import pluggy
from packaging.requirements import Requirement

from rackmount_registry import API_VERSION, ENTRY_POINT_GROUP, hookspecs
from rackmount_registry.descriptors import (
    AttentionBackend,
    ComputeDescriptor,
    Descriptor,
    ModelSource,
    OpSet,
)
from rackmount_registry.errors import PluginError, did_you_mean
from rackmount_registry.offers import HOOKS, BrokenPlugin, claims_of, normalize
from rackmount_registry.plain import misfits, spell

CONTRACT = "rackmount-registry"
NAME = re.compile(r"[a-z0-9._-]+")
DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
PATH = re.compile(f"{DOTTED}:{DOTTED}")
NAMELESS = "(no name)"


@dataclass(frozen=True, kw_only=True)
class PluginSource:
    """A plugin before it is imported."""

    distribution: str
    version: str
    entry_point: str
    requires: tuple[str, ...]
    """The distribution's Requires-Dist."""
    load: Callable[[], object]
    """Imports the module of hookimpls."""


def installed(distributions: Iterable[Distribution]) -> Iterator[PluginSource | BrokenPlugin]:
    """Every entry point of the group; of a distribution that is there twice, the first one's.

    A distribution whose entry points cannot be read is broken, whatever it holds: it may be a
    plugin. One without a name, as an interrupted uninstall leaves it, counts only where it does
    name a plugin.
    """
    seen = set()
    for distribution in distributions:
        name = _name(distribution)
        if name in seen:
            continue
        if name != NAMELESS:
            seen.add(name)
        try:
            yield from _sources(name, distribution)
        except Exception as error:
            if name != NAMELESS:
                yield BrokenPlugin(
                    distribution=name,
                    version=distribution.version or "?",
                    entry_point="",
                    error=f"its entry points cannot be read: {type(error).__name__}: {error}",
                )


def _name(distribution: Distribution) -> str:
    try:
        return normalize(distribution.metadata["Name"] or NAMELESS)
    except Exception:  # without METADATA, each version of Python raises something else
        return NAMELESS


def _sources(name: str, distribution: Distribution) -> list[PluginSource]:
    return [
        PluginSource(
            distribution=name,
            version=distribution.version or "?",
            entry_point=entry_point.name,
            requires=tuple(distribution.requires or ()),
            load=entry_point.load,
        )
        for entry_point in distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    ]


def load_plugin(source: PluginSource) -> list[Descriptor]:
    """All descriptors of one plugin, in the order of the hooks.

    Raises:
        PluginError: the plugin was written for another version of the contract (it is then not
            imported), carries a hook wrongly, or a hook does not return a list of well-formed
            descriptors of its kind.
    """
    check_api_range(source.requires)
    plugin = source.load()
    manager = pluggy.PluginManager("rackmount")
    manager.add_hookspecs(hookspecs)
    for name in HOOKS:
        stray = getattr(plugin, name, None)
        if stray is None or isinstance(stray, ModuleType):
            continue
        if manager.parse_hookimpl_opts(plugin, name) is None:
            raise PluginError(f"{name} has the name of a hook but no @hookimpl decorator")
    manager.register(plugin)
    _check_hooks_known(manager)
    return [part for name in HOOKS for part in _call(manager, name)]


def check_api_range(requires: Iterable[str]) -> None:
    """Holds the range that a plugin states in its metadata against this contract's version.

    Raises:
        PluginError: no range is stated, or API_VERSION is outside it.
    """
    stated = [Requirement(line) for line in requires]
    ranges = [
        need.specifier
        for need in stated
        if normalize(need.name) == CONTRACT and (not need.marker or need.marker.evaluate())
    ]
    if not ranges:
        raise PluginError(
            f"its metadata names no range of {CONTRACT}; one is expected, e.g. >=1.0,<2"
        )
    for specifier in ranges:
        if not specifier.contains(API_VERSION, prereleases=True):
            raise PluginError(f"it needs {CONTRACT} {specifier}, this is {API_VERSION}")


def _check_hooks_known(manager: pluggy.PluginManager) -> None:
    for name, hook in vars(manager.hook).items():
        if name not in HOOKS and not all(impl.optionalhook for impl in hook.get_hookimpls()):
            legal = ", ".join(HOOKS)
            raise PluginError(f"unknown hook {name!r}{did_you_mean(name, HOOKS)}; legal: {legal}")


def _call(manager: pluggy.PluginManager, name: str) -> Iterator[Descriptor]:
    """Calls one hook of the one plugin in `manager` and checks all that comes."""
    hook, kind = getattr(manager.hook, name), HOOKS[name]
    results = hook()
    if len(results) != len(hook.get_hookimpls()):  # pluggy drops None
        raise PluginError(_expected(name, "None"))
    for result in results:
        if not isinstance(result, list | tuple):
            raise PluginError(_expected(name, spell(type(result))))
        for part in result:
            if not isinstance(part, kind):
                raise PluginError(_expected(name, f"a list with {part!r}"))
            if wrong := list(flaws(part)):
                raise PluginError(f"hook {name}: {part.kind} {part.name!r}: {'; '.join(wrong)}")
            yield part


def _expected(hook: str, got: str) -> str:
    return f"hook {hook} returned {got}; a list of {HOOKS[hook].__name__} is expected"


def flaws(part: Descriptor) -> Iterator[str]:
    """A line for each malformed value of a descriptor."""
    wrong_types = list(misfits(part, type(part), type(part).__name__))
    yield from wrong_types
    if wrong_types:
        return
    names = (part.name, *part.aliases) if isinstance(part, ModelSource) else (part.name,)
    for name in names:
        if not NAME.fullmatch(name):
            yield f"name {name!r} has characters other than a-z, 0-9, '.', '_', '-'"
    for field, path in (("factory", part.factory), ("options", part.options)):
        optional = path is None or (isinstance(part, ModelSource) and path == "")
        if not optional and not PATH.fullmatch(path or ""):
            yield f"{field}={path!r} is not of the form 'package.module:attribute'"
    claims = claims_of(part)
    if len(set(claims)) < len(claims) or any(not claim or ":" in claim for claim in claims):
        yield f"claims={claims} holds a claim twice, or one that is empty or has a colon"
    if isinstance(part, ModelSource) and part.serves is not None:
        try:
            re.compile(part.serves)
        except re.error as error:
            yield f"serves={part.serves!r} is no regular expression: {error}"
    if isinstance(part, ComputeDescriptor):
        yield from _compute_flaws(part)


def _compute_flaws(part: ComputeDescriptor) -> Iterator[str]:
    if not part.cells:
        yield "cells is empty, so it would never be chosen"
    for index, cell in enumerate(part.cells):
        if (first := part.cells.index(cell)) < index:
            yield f"cells[{index}] repeats cells[{first}]"
    if isinstance(part, AttentionBackend):
        sizes = part.preferred_block_sizes
        if not sizes or min(sizes) < 1:
            yield f"preferred_block_sizes={sizes} must hold positive sizes, at least one"
    if isinstance(part, OpSet) and not part.ops:
        yield "ops is empty"
