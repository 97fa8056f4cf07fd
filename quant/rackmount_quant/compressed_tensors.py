"""Quantization scheme "compressed-tensors": what llm-compressor saves, in integers or FP8.

See `compressed_tensors/quantization` of vllm-project/compressed-tensors. Its own parser refuses
keys and kinds of act-order that published checkpoints have, so this one reads them for itself.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from rackmount_quant.compressed_arguments import STORED_AS, read_inputs, read_weights
from rackmount_quant.key_maps import read_key_map_names
from rackmount_quant.names import Names, listed, read_names
from rackmount_quant.settings import choice, kv_cache_scheme, nested
from rackmount_registry.config import ConfigReader
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import Role, StoredFormat

HARMLESS = frozenset({"global_compression_ratio", "quantization_status", "quant_method", "version"})
"""Who saved the checkpoint, and how small it became."""

LINEAR = "Linear"
"""The class that all weights are of: the one target that is no name."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """One of `config_groups`: what it targets, and how that is stored."""

    exact: Names
    patterns: Names
    linear: bool
    """Targets the class `LINEAR`."""
    stored: Callable[[tuple[int, int]], StoredFormat] | None
    """Shape [out, in] of a whole weight -> its format; None: plain."""
    group_size: int
    """What its columns must be a multiple of."""
    error: Callable[[str, str], ConfigError]
    """Of a key of its weights, and the rule that this breaks."""


class CompressedTensorsScheme:
    """See `rackmount_registry.formats.QuantizationScheme`.

    A weight belongs to the group that names it, else to the first with a pattern ("re:") for it,
    else to the first that targets "Linear": heads and routers as well. What `ignore` names is plain
    (see `names.listed`).
    """

    def __init__(self, config: ConfigReader) -> None:
        """
        Raises:
            ConfigError: a format, strategy or number of bits that is not read, transforms of
                weights, sparsity, values of the wrong kind, or unknown keys.
        """
        self._ignored = read_names(config, "ignore")
        self.kv_cache, self._key_maps = kv_cache_scheme(config), read_key_map_names(config)
        if self._key_maps is not None:
            if self.kv_cache is None:
                raise config.error("transform_config", "maps keys, and no kv_cache_scheme is there")
            self.kv_cache = replace(self.kv_cache, key_map_names=self._key_maps)
        choice(config, "moe_sparsity_config", [None, {}])
        _require_dense(config)
        # "dense" is the KV cache alone.
        form = choice(config, "format", [*STORED_AS, "mixed-precision", "dense"])
        names, groups = config.get("config_groups"), nested(config, "config_groups")
        if not names and self.kv_cache is None:
            raise config.error("config_groups", "must hold a group or more")
        self._groups: list[Group] = []
        if groups is not None:
            self._groups += [_read_group(groups, name, form) for name in names]
        if sum(group.linear for group in self._groups) > 1:
            raise config.error("config_groups", f"must target {LINEAR} in one group alone")
        config.require_all_read(HARMLESS)

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The format of the group that the weight belongs to.

        Raises:
            ConfigError: columns that do not fill groups.
        """
        group = None if name in self._ignored else self._find(name)
        if group is None or group.stored is None:
            return None
        if shape[1] % group.group_size:
            rule = f"must divide the columns of {name}, which are {shape[1]}"
            raise group.error("group_size", rule)
        return group.stored(shape)

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Entries of `ignore` and `targets` that mean none of `modules`."""
        targets = [names for group in self._groups for names in (group.exact, group.patterns)]
        mapped = [] if self._key_maps is None else self._key_maps.unmet(modules)
        unmet = [entry for names in (self._ignored, *targets) for entry in names.unmet(modules)]
        return unmet + mapped

    def _find(self, name: str) -> Group | None:
        for targets in (
            lambda group: name in group.exact,
            lambda group: name in group.patterns,
            lambda group: group.linear,
        ):
            for group in self._groups:
                if targets(group):
                    return group
        return None


def _require_dense(config: ConfigReader) -> None:
    """Holds that no zeros are left out of the weights."""
    key = "sparsity_config"
    if not config.get(key):
        return
    sparsity = nested(config, key)
    if sparsity is not None and sparsity.get("format") != "dense":
        raise config.error(key, "must have the format 'dense'")


def _read_group(groups: ConfigReader, name: str, form: str) -> Group:
    """One of `config_groups`, stored in a `format` of its own or in `form`."""
    group = groups.sub(name)
    if group is None:
        raise groups.error(name, "must be an object")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise group.error("targets", "must be a list of names")
    choice(group, "output_activations", [None])
    inputs, weights = read_inputs(group), nested(group, "weights")
    stored, size = None, 1
    if weights is not None:
        stored, size = read_weights(weights, choice(group, "format", [*STORED_AS], form), inputs)
    elif inputs is not None:
        raise group.error("input_activations", "round the input of weights that are not quantized")
    group.require_all_read(frozenset({"format"}))
    return Group(
        exact=Names(t for t in targets if t != LINEAR and not t.startswith("re:")),
        patterns=read_names(group, "targets", kind=_patterns),
        linear=LINEAR in targets,
        stored=stored,
        group_size=size,
        error=(weights or group).error,
    )


def _patterns(targets: Iterable[str]) -> Names:
    return listed(target for target in targets if target.startswith("re:"))
