"""The manifest: what one process mounted, for others to prove that they mounted the same."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rackmount_registry.errors import PluginError
from rackmount_registry.offers import Offer
from rackmount_registry.plain import as_plain


@dataclass(frozen=True, order=True)
class ManifestEntry:
    """One distribution that offers parts."""

    distribution: str
    version: str
    sha256: str
    """Of the canonical JSON of its descriptors, hexadecimal."""


Manifest = tuple[ManifestEntry, ...]
"""Sorted by distribution."""


def make_manifest(offers: Iterable[Offer[Any]]) -> Manifest:
    """The manifest of all distributions behind `offers`, whatever their order."""
    parts: dict[tuple[str, str], list[str]] = {}
    for offer in offers:
        text = json.dumps([offer.descriptor.kind, as_plain(offer.descriptor)], sort_keys=True)
        parts.setdefault((offer.distribution, offer.version), []).append(text)
    return tuple(
        ManifestEntry(*owner, hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest())
        for owner, texts in sorted(parts.items())
    )


def prove(mine: Manifest, theirs: Manifest) -> None:
    """Holds this process's manifest against the driver's.

    Raises:
        PluginError: naming each distribution that differs, and both sides.
    """
    here, there = ({entry.distribution: entry for entry in side} for side in (mine, theirs))
    lines = [
        f"{name}: the driver has {_side(there.get(name))}, this process {_side(here.get(name))}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if lines:
        raise PluginError(f"plugins differ between processes: {'; '.join(lines)}")


def _side(entry: ManifestEntry | None) -> str:
    return f"version {entry.version} sha256 {entry.sha256[:12]}" if entry else "none"
