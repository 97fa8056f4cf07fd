"""Names in a scheme's configuration, held against the names of logical weights.

Checkpoints name projections one by one (`q_proj`), other engines fuse some of them (`qkv_proj`),
and `transformers` 5 names the experts of a layer together (`experts.gate_up_proj`). A list may use
any of these.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from types import MappingProxyType

from rackmount_registry.config import ConfigReader

FUSED_NAMES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Fused projection -> its parts."""

EXPERT_INDEX = re.compile(r"\.experts\.\d+\.")

Test = Callable[[str], object]
"""True, or anything that counts as such, for a name that is meant."""


class Names:
    """A list of names that answers `name in names`.

    Args:
        plain: runs of whole components, "lm_head" or "mlp.gate" or "model.layers.0": each means
            all weights in whose name it stands.
        tests: entry -> its pattern. One that a fused name passes means the parts, unless one of
            these passes by itself: `.*v_proj` means v_proj, though `qkv_proj` ends so as well.
    """

    def __init__(
        self, plain: Iterable[str] = (), tests: Mapping[str, Test] = MappingProxyType({})
    ) -> None:
        self._plain = frozenset(plain)
        self._firsts = frozenset(entry.partition(".")[0] for entry in self._plain)
        self._tests = tests

    def __contains__(self, name: str) -> bool:
        return any(True for _ in self._plain_for(name)) or any(
            passes(test, name) for test in self._tests.values()
        )

    def unmet(self, names: Iterable[str]) -> list[str]:
        """Entries that mean none of `names`, sorted."""
        left = self._plain | self._tests.keys()
        for name in names:
            if not left:
                break
            tests = left & self._tests.keys()
            left -= {entry for entry in tests if passes(self._tests[entry], name)}
            left -= set(self._plain_for(name))
        return sorted(left)

    def _plain_for(self, name: str) -> Iterator[str]:
        """Plain entries that mean it, by any of its spellings."""
        for spelling in _spellings(name):
            yield from self._listed(spelling)
            for fused, _ in _fused(spelling):
                yield from self._listed(fused)

    def _listed(self, name: str) -> Iterator[str]:
        """Runs of the name's components that are listed; a model may have 50,000 names."""
        components = name.split(".")
        for start, first in enumerate(components):
            if first not in self._firsts:
                continue
            for stop in range(start + 1, len(components) + 1):
                if (run := ".".join(components[start:stop])) in self._plain:
                    yield run


def passes(test: Test, name: str) -> bool:
    """Whether `test` means the weight `name`, by its own or by a fused name."""
    for spelling in _spellings(name):
        if test(spelling):
            return True
        for fused, siblings in _fused(spelling):
            if test(fused) and not any(test(sibling) for sibling in siblings):
                return True
    return False


def listed(entries: Iterable[str]) -> Names:
    """Names as compressed-tensors and `transformers` list them: "re:" before a regular expression
    that must match from a name's start, or plain.

    Raises:
        re.error: a broken regular expression.
    """
    entries = list(entries)
    plain = (entry for entry in entries if not entry.startswith("re:"))
    patterns = (entry for entry in entries if entry.startswith("re:"))
    return Names(plain, {entry: re.compile(entry[3:]).match for entry in patterns})


def substrings(entries: Iterable[str]) -> Names:
    """Names as AutoAWQ lists them: anything that stands in a weight's name."""
    return Names(tests={entry: _contains(entry) for entry in entries})


def wildcards(entries: Iterable[str]) -> Names:
    """Names as ModelOpt lists them: patterns of the shell for whole names, or plain."""
    entries = list(entries)
    patterns = (entry for entry in entries if set(entry) & set("*?["))
    return Names(entries, {entry: re.compile(translate(entry)).match for entry in patterns})


def read_names(
    config: ConfigReader, *keys: str, kind: Callable[[Iterable[str]], Names] = listed
) -> Names:
    """The names under all of `keys`; a missing or null key has none.

    Raises:
        ConfigError: no list of strings, or a broken regular expression.
    """
    entries: list[str] = []
    for key in keys:
        found = config.get(key)
        if found is None:
            continue
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise config.error(key, "must be a list of names")
        try:
            kind(found)
        except re.error as error:
            raise config.error(key, f"has a broken regular expression: {error}") from error
        entries += found
    return kind(entries)


def _contains(entry: str) -> Test:
    return lambda name: entry in name


def _spellings(name: str) -> list[str]:
    """The name, and for experts the one without their number."""
    together = EXPERT_INDEX.sub(".experts.", name)
    return [name] if together == name else [name, together]


def _fused(name: str) -> list[tuple[str, list[str]]]:
    """Each fused name for `name`, with those of all its parts."""
    owner, dot, last = name.rpartition(".")
    return [
        (owner + dot + fused, [owner + dot + part for part in parts])
        for fused, parts in FUSED_NAMES.items()
        if last in parts
    ]
