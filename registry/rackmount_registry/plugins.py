"""The plugin manager: all that is mounted in this process, resolved once, then looked up."""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution
from typing import Any, TypeVar, overload

from rackmount_registry import API_VERSION
from rackmount_registry.descriptors import ComputeDescriptor, Descriptor
from rackmount_registry.discovery import CONTRACT, PluginSource, installed, load_plugin
from rackmount_registry.errors import PluginError, did_you_mean
from rackmount_registry.manifest import Manifest, make_manifest, prove
from rackmount_registry.offers import (
    BANDS,
    KINDS,
    BrokenPlugin,
    Offer,
    by_claim,
    find_offer,
    legal_names,
    normalize,
)

D = TypeVar("D", bound=Descriptor)


class PluginManager:
    """Offers of all plugins and the plugins that are broken. No hook is called once it exists."""

    def __init__(self, offers: Iterable[Offer[Any]], broken: Iterable[BrokenPlugin] = ()) -> None:
        self._offers = tuple(sorted(offers, key=_by_band_then_name))
        self.broken = tuple(broken)

    @classmethod
    def discover(cls, distributions: Iterable[Distribution] | None = None) -> "PluginManager":
        """Loads every entry point of the group `rackmount`, by default of all installed
        distributions.

        A plugin that fails is listed as broken and takes no other along; KeyboardInterrupt alone
        passes.
        """
        if distributions is None:
            distributions = importlib.metadata.distributions()
        return cls._load(installed(distributions))

    @classmethod
    def from_modules(
        cls, modules: Mapping[str, object], versions: Mapping[str, str] | None = None
    ) -> "PluginManager":
        """Plugins by name of a distribution that need not be installed: for tests and for
        embedding.

        `versions` are "0" where not given. No metadata states a range of the contract, so none is
        checked.
        """
        sources = [
            PluginSource(
                distribution=normalize(name),
                version=(versions or {}).get(name, "0"),
                entry_point="plugin",
                requires=(f"{CONTRACT}=={API_VERSION}",),
                load=lambda module=module: module,  # type: ignore[misc]  # a default binds early
            )
            for name, module in modules.items()
        ]
        return cls._load(sources)

    @classmethod
    def _load(cls, sources: Iterable[PluginSource | BrokenPlugin]) -> "PluginManager":
        offers: list[Offer[Any]] = []
        broken = []
        for source in sources:
            if isinstance(source, BrokenPlugin):
                broken.append(source)
                continue
            about = {"distribution": source.distribution, "version": source.version}
            try:
                parts = [Offer(descriptor=part, **about) for part in load_plugin(source)]
                _check_twice(parts + [o for o in offers if o.distribution == source.distribution])
                offers += parts
            except (Exception, SystemExit) as error:
                name = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
                broken.append(
                    BrokenPlugin(entry_point=source.entry_point, error=f"{name}{error}", **about)
                )
        return cls(offers, broken)

    def __add__(self, other: "PluginManager") -> "PluginManager":
        """Both side by side, as to mount a plugin of one's own beside the installed ones.

        Raises:
            PluginError: a distribution offers parts in both.
        """
        mine, theirs = ({o.distribution for o in side._offers} for side in (self, other))
        if both := ", ".join(sorted(mine & theirs)):
            raise PluginError(f"two managers hold parts of one distribution: {both}")
        return PluginManager(self._offers + other._offers, self.broken + other.broken)

    @overload
    def offers(self, kind: type[D]) -> tuple[Offer[D], ...]: ...
    @overload
    def offers(self, kind: str | None = None) -> tuple[Offer[Any], ...]: ...
    def offers(self, kind: type[Descriptor] | str | None = None) -> tuple[Offer[Any], ...]:
        """All offers of a kind (or of all), by band, then name. Contested ones are among them."""
        if kind is None:
            return self._offers
        noun = _noun(kind)
        return tuple(offer for offer in self._offers if offer.descriptor.kind == noun)

    @overload
    def find(self, kind: type[D], name: str) -> Offer[D]: ...
    @overload
    def find(self, kind: str, name: str) -> Offer[Any]: ...
    def find(self, kind: type[Descriptor] | str, name: str) -> Offer[Any]:
        """The part called `name` or "dist:name".

        Raises:
            PluginError: unknown or contested; see `offers.find_offer`.
        """
        return find_offer(_noun(kind), self.offers(kind), name, broken=self.broken)

    @overload
    def claimed(self, kind: type[D], claim: str) -> Offer[D]: ...
    @overload
    def claimed(self, kind: str, claim: str) -> Offer[Any]: ...
    def claimed(self, kind: type[Descriptor] | str, claim: str) -> Offer[Any]:
        """The part that claims an architecture, a quantization method or a model's alias;
        "dist:claim" chooses.

        Raises:
            PluginError: no part claims it, or several do.
        """
        noun, offers = _noun(kind), self.offers(kind)
        return find_offer(noun, offers, claim, broken=self.broken, keys=by_claim)

    def claims(self, kind: type[Descriptor] | str) -> list[str]:
        """Everything that parts of a kind claim, as `claimed` takes it."""
        return legal_names(self.offers(kind), by_claim)

    def manifest(self) -> Manifest:
        """What is mounted here."""
        return make_manifest(self._offers)

    def prove(self, manifest: Manifest) -> None:
        """Raises PluginError with each distribution that differs from the driver's `manifest`."""
        prove(self.manifest(), manifest)


def _noun(kind: type[Descriptor] | str) -> str:
    noun = kind if isinstance(kind, str) else kind.kind
    if noun not in KINDS:
        legal = ", ".join(KINDS)
        raise PluginError(f"unknown kind {noun!r}{did_you_mean(noun, KINDS)}; legal: {legal}")
    return noun


def _by_band_then_name(offer: Offer[Any]) -> tuple[int, str, str]:
    part = offer.descriptor
    band = BANDS.index(part.band) if isinstance(part, ComputeDescriptor) else 0
    return band, offer.name, offer.distribution


def _check_twice(offers: Sequence[Offer[Any]]) -> None:
    """One distribution may use a name or claim once: "dist:name" could not tell them apart."""
    seen = set()
    for offer in offers:
        for use in ("", offer.name), *(("claim ", claim) for claim in offer.claims):
            key = (offer.descriptor.kind, *use)
            if key in seen:
                raise PluginError(
                    f"{key[0]} {key[1]}{key[2]!r} is offered twice by this distribution"
                )
            seen.add(key)
