"""`transform_config` of compressed-tensors, as far as it maps queries and keys before the cache.

Other transforms change what weights mean, and are refused. See `compressed_tensors/transform` of
vllm-project/compressed-tensors: the matrix of group NAME stands at `NAME_LOCATION.weight` in the
module that it is applied to.
"""

from collections.abc import Collection
from itertools import chain

from rackmount_quant.names import Names, read_names
from rackmount_quant.settings import choice, nested
from rackmount_registry.config import ConfigReader
from rackmount_registry.errors import ConfigError

KEY = "transform_config"
LOCATIONS = ("q_attn", "k_cache")
HARMLESS = frozenset({"head_dim", "precision", "requires_grad"})
"""The size of a matrix, which it tells itself; in what it is to be multiplied, which here is the
model's dtype; and how it was found."""


class KeyMapNames:
    """`rackmount_registry.formats.KVCacheScheme.key_map_names` of a `transform_config`.

    Raises:
        ConfigError: a transform of anything but queries and keys, or by anything but a matrix that
            the checkpoint holds; unknown keys.
    """

    def __init__(self, transforms: ConfigReader) -> None:
        groups, names = nested(transforms, "config_groups"), transforms.get("config_groups")
        transforms.require_all_read()
        self._found: dict[str, list[tuple[Names, str]]] = {where: [] for where in LOCATIONS}
        if groups is None:
            return
        for name in names:
            group = groups.sub(name)
            if group is None:
                raise groups.error(name, "must be an object")
            choice(group, "type", ["random-matrix"])
            choice(group, "randomize", [False], False)
            for each in group.subs("apply"):
                where = choice(each, "location", LOCATIONS)
                choice(each, "inverse", [False], False)
                choice(each, "ignore", [[]], [])
                targets = read_names(each, "targets")
                if not each.targets or any("." not in target for target in each.targets):
                    raise each.error("targets", "must name modules, by path or by 're:'")
                each.require_all_read()
                self._found[where].append((targets, f"{name}_{where}.weight"))
            group.require_all_read(HARMLESS)

    def __bool__(self) -> bool:
        return any(self._found.values())

    def __call__(self, name: str) -> tuple[str, str] | None:
        """Raises ConfigError where one of two is missing, or there is more than one."""
        q, k = ([t for names, t in self._found[w] if name in names] for w in LOCATIONS)
        if not q and not k:
            return None
        if len(q) != 1 or len(k) != 1:
            raise ConfigError(
                f"{KEY} must map {name} by one matrix at each of {' and '.join(LOCATIONS)}, and "
                f"has {q or 'none'} and {k or 'none'}"
            )
        return q[0], k[0]

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Targets that hold none of `modules`."""
        holders = {module.rpartition(".")[0] for module in modules}
        found = chain.from_iterable(self._found.values())
        return [entry for names, _ in found for entry in names.unmet(holders)]


def read_key_map_names(config: ConfigReader) -> KeyMapNames | None:
    """None where nothing is mapped. ConfigError as for `KeyMapNames`."""
    if config.get(KEY) is None:
        return None
    transforms = nested(config, KEY)
    return None if transforms is None else KeyMapNames(transforms) or None
