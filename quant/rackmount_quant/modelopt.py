"""Quantization scheme "modelopt": FP8 weights of NVIDIA ModelOpt.

| `quant_algo` | stored beside `weight`, float8_e4m3fn | inputs |
| --- | --- | --- |
| FP8 | `weight_scale` and `input_scale`, one each | static |
| FP8_PER_CHANNEL_PER_TOKEN | `weight_scale` [out] | by token |
| FP8_PB_WO | `weight_scale` [out / 128, 1, in / 128, 1] | as they are |

`quantization_config` holds the settings itself, with `ignore` and `kv_cache_scheme`; or as
hf_quant_config.json does, in `quantization`, with `exclude_modules` and `kv_cache_quant_algo`.
`config_groups` says the algorithm again, as compressed-tensors does. See `modelopt/torch/export` of
NVIDIA/Model-Optimizer.
"""

from collections.abc import Callable, Collection, Mapping

from rackmount_quant.compressed_arguments import read_inputs, read_weights
from rackmount_quant.eight_bits import fp8_blocks, fp8_rows
from rackmount_quant.names import read_names, wildcards
from rackmount_quant.settings import choice, kv_cache_scheme, nested
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import KVCacheScheme, Role, StoredFormat

ALGORITHMS: Mapping[str, Callable[[], StoredFormat]] = {
    "FP8": lambda: fp8_rows("tensor", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda: fp8_rows("channel", "token"),
    "FP8_PB_WO": lambda: fp8_blocks("plain"),
}

HARMLESS = frozenset({"producer", "quant_library", "quant_method"})
"""Who saved it."""


class ModelOptScheme:
    """See `rackmount_registry.formats.QuantizationScheme`. Routers and heads are plain, and what
    the list of exclusions names (see `names.wildcards`)."""

    def __init__(self, config: ConfigReader) -> None:
        """
        Raises:
            ConfigError: an algorithm that is not read, values of the wrong kind, or unknown keys.
        """
        settings = nested(config, "quantization") or config
        algorithm = settings.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
            raise settings.error("quant_algo", f"must be one of {', '.join(ALGORITHMS)}")
        self._stored = ALGORITHMS[algorithm.upper()]()
        choice(settings, "group_size", [None, 0])
        _require_same(settings, self._stored)
        self._plain = read_names(settings, "ignore", "exclude_modules", kind=wildcards)
        self.kv_cache = kv_cache_scheme(settings)
        if choice(settings, "kv_cache_quant_algo", ["FP8", None]) == "FP8":
            self.kv_cache = self.kv_cache or KVCacheScheme()
        settings.require_all_read(HARMLESS)
        config.require_all_read(HARMLESS)

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The one format, but None for routers, heads and what is excluded."""
        return None if role in ("router", "head") or name in self._plain else self._stored

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Entries of the list of exclusions that mean none of `modules`."""
        return self._plain.unmet(modules)


def _require_same(settings: ConfigReader, stored: StoredFormat) -> None:
    """Holds that `config_groups` say of all weights what the algorithm does."""
    groups = nested(settings, "config_groups")
    if groups is None:
        return
    for name in settings.get("config_groups"):
        group = groups.sub(name)
        weights = nested(group, "weights") if group else None
        if group is None or weights is None:
            raise groups.error(name, "must have weights")
        choice(group, "targets", [["Linear"], None])
        choice(weights, "group_size", [None])
        again, _ = read_weights(weights, "float-quantized", read_inputs(group))
        group.require_all_read()
        if again((0, 0)) != stored:
            found = again((0, 0)).name
            raise groups.error(name, f"is {found}, and quant_algo {stored.name}")
