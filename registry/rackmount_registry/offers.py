"""Offers: descriptors with the distribution that brought them, and how one is found by its name."""

import importlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from rackmount_registry import hookspecs
from rackmount_registry.descriptors import (
    Architecture,
    Band,
    CliCommand,
    ComputeDescriptor,
    Descriptor,
    ModelSource,
    QuantizationScheme,
)
from rackmount_registry.errors import PluginError, RackmountError, did_you_mean

HOOKS: dict[str, type[Descriptor]] = {
    name: get_args(get_type_hints(hook)["return"])[0]
    for name, hook in vars(hookspecs).items()
    if hasattr(hook, "rackmount_spec")
}
"""Name of each hook -> class of the descriptors that it returns a list of."""

KINDS = {cls.kind: cls for cls in HOOKS.values()}

FIRST_PARTY = frozenset(
    {
        "rackmount-core",
        "rackmount-plugins-backends",
        "rackmount-plugins-deepgemm",
        "rackmount-plugins-executors",
        "rackmount-plugins-gguf",
        "rackmount-plugins-models",
        "rackmount-plugins-moe",
        "rackmount-plugins-quant",
        "rackmount-plugins-server",
        "rackmount-plugins-tools",
        "rackmount-plugins-xgrammar",
    }
)
"""Distributions whose parts `auto` may choose without being told."""

BROUGHT_BY = {
    "architecture": "rackmount-plugins-models",
    "attention_backend": "rackmount-plugins-backends",
    "cli_command bench": "rackmount-plugins-tools",
    "cli_command serve": "rackmount-plugins-server",
    "executor": "rackmount-plugins-executors",
    "expert_kernel": "rackmount-plugins-moe",
    "expert_kernel deepgemm": "rackmount-plugins-deepgemm",
    "grammar_backend": "rackmount-plugins-xgrammar",
    "linear_kernel": "rackmount-plugins-backends",
    "linear_kernel deepgemm": "rackmount-plugins-deepgemm",
    "op_set": "rackmount-plugins-backends",
    "quantization_scheme": "rackmount-plugins-quant",
    "token_dispatcher": "rackmount-plugins-moe",
}
"""Kind -> distribution that holds the usual parts of it, or kind and name -> that holds this part:
where to look for what is not mounted."""

BANDS: tuple[Band, ...] = ("vendor", "portable", "reference")
"""In the order of `auto`."""

D = TypeVar("D", bound=Descriptor)
D_co = TypeVar("D_co", bound=Descriptor, covariant=True)


@dataclass(frozen=True, kw_only=True)
class BrokenPlugin:
    """An entry point that could not be loaded; nothing of it is mounted."""

    distribution: str
    version: str
    entry_point: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Offer(Generic[D_co]):
    """A part that a plugin offers."""

    descriptor: D_co
    distribution: str
    """Normalized name (PEP 503)."""
    version: str

    @property
    def name(self) -> str:
        """What the part is called by; a command's includes its group, as in "bench scheduler"."""
        part = self.descriptor
        if isinstance(part, CliCommand) and part.group:
            return f"{part.group} {part.name}"
        return part.name

    @property
    def claims(self) -> tuple[str, ...]:
        """What else the part answers to: architectures, quantization methods, aliases of models."""
        return claims_of(self.descriptor)

    @property
    def first_party(self) -> bool:
        return self.distribution in FIRST_PARTY

    def missing(self) -> tuple[str, ...]:
        """A line for each required module not installed, with the command that brings it."""
        return tuple(
            f"module {need.module} is not installed: {need.install}"
            for need in self.descriptor.requires
            if not is_installed(need.module)
        )

    def load(self) -> Any:
        """Imports the factory.

        Raises:
            PluginError: a required module is missing, or the import fails, or there is no factory
                to import.
        """
        whole = f"{self.descriptor.kind} {self.name!r} of {self.distribution} {self.version}"
        if missing := self.missing():
            raise PluginError(f"{whole} cannot be used: {'; '.join(missing)}")
        if not self.descriptor.factory:
            raise PluginError(f"{whole} has no factory: it names models and fetches none")
        return import_attribute(self.descriptor.factory, whole)

    def as_plain(self) -> dict[str, object]:
        """The offer in short."""
        part = self.descriptor
        plain: dict[str, object] = {"kind": part.kind, "name": self.name}
        if isinstance(part, ComputeDescriptor):
            plain["band"] = part.band
        return plain | {"distribution": self.distribution, "version": self.version}


def claims_of(descriptor: Descriptor) -> tuple[str, ...]:
    """What a descriptor answers to beside its name."""
    match descriptor:
        case Architecture() | QuantizationScheme():
            return descriptor.claims
        case ModelSource():
            return tuple(descriptor.aliases)
    return ()


def normalize(distribution: str) -> str:
    """The one spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def is_installed(module: str) -> bool:
    """Whether `module` could be imported. Nothing is imported to find out, not even its parent."""
    if sys.modules.get(module) is not None:
        return True
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec is not None


def import_attribute(path: str, whole: str) -> Any:
    """The object at "package.module:attribute"; `whole` names its owner in errors.

    Raises:
        PluginError: the module cannot be imported or lacks the attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{whole}: importing {path} failed: {type(error).__name__}: {error}"
        ) from error
    return found


def by_name(offer: Offer[Descriptor]) -> tuple[str, ...]:
    """Keys of a look-up by name."""
    return (offer.name,)


def by_claim(offer: Offer[Descriptor]) -> tuple[str, ...]:
    """Keys of a look-up by claim."""
    return offer.claims


def legal_names(
    offers: Iterable[Offer[Descriptor]], keys: Callable[[Offer[Any]], tuple[str, ...]] = by_name
) -> list[str]:
    """What a look-up accepts, sorted; contested names as "dist:name"."""
    pairs = [(key, offer.distribution) for offer in offers for key in keys(offer)]
    uses = Counter(key for key, _ in pairs)
    return sorted(key if uses[key] == 1 else f"{owner}:{key}" for key, owner in pairs)


def find_offer(
    kind: str,
    offers: Sequence[Offer[D]],
    wanted: str,
    *,
    broken: Sequence[BrokenPlugin] = (),
    keys: Callable[[Offer[Any]], tuple[str, ...]] = by_name,
    error: type[RackmountError] = PluginError,
) -> Offer[D]:
    """The offer called `wanted`, a name or "dist:name".

    Raises:
        RackmountError: of the class `error`. The name is unknown: the message lists the legal ones,
            the nearest, the broken plugins, and where parts of this kind come from. Or it is
            contested: the message names all sides.
    """
    owner, _, name = wanted.rpartition(":")
    found = [
        offer
        for offer in offers
        if name in keys(offer) and (not owner or normalize(owner) == offer.distribution)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        sides = " and ".join(f"{offer.distribution} {offer.version}" for offer in found)
        choices = " or ".join(repr(f"{offer.distribution}:{name}") for offer in found)
        raise error(f"{kind} {name!r} is offered by {sides}; choose with {choices}")
    legal = legal_names(offers, keys)
    message = f"unknown {kind} {wanted!r}{did_you_mean(wanted, legal)}; "
    message += f"mounted: {', '.join(legal) or 'none'}"
    raise error(message + _where_from(kind, wanted, [*offers, *broken]) + broken_note(broken))


def _where_from(kind: str, wanted: str, present: Iterable[Offer[Descriptor] | BrokenPlugin]) -> str:
    own = BROUGHT_BY.get(f"{kind} {wanted}")
    usual = own or BROUGHT_BY.get(kind)
    if usual is None:
        return ". It may come with a plugin that is not installed"
    if all(plugin.distribution != usual for plugin in present):
        return f". `pip install {usual}` brings {'it' if own else 'the first-party ones'}"
    return f". A newer {usual}, or a plugin of another distribution, may bring it"


def broken_note(broken: Sequence[BrokenPlugin]) -> str:
    """The end of every failed look-up: plugins that could not be loaded might have had the part."""
    if not broken:
        return ""
    lines = (f"{plugin.distribution} {plugin.version} ({plugin.error})" for plugin in broken)
    return f". Broken plugins: {'; '.join(lines)}"
