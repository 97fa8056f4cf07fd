"""Values of a quantization_config: from closed sets, under either of two keys."""

from collections.abc import Sequence
from typing import Any

from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import KVCacheScheme


def choice(config: ConfigReader, key: str, legal: Sequence[Any], default: Any = None) -> Any:
    """The value of `key`, one of `legal`; `default` stands for a missing or null key.

    Raises:
        ConfigError: another value, or none where `default` is not legal either.
    """
    value = config.get(key)
    if value is None:
        value = default
    if not any(value is each or (type(value) is type(each) and value == each) for each in legal):
        raise config.error(key, f"must be {' or '.join(map(repr, legal))}")
    return value


def nested(config: ConfigReader, key: str) -> ConfigReader | None:
    """The object under `key`, whose reader holds it to account by itself: it has harmless keys of
    its own. None where there is none.

    Raises:
        ConfigError: the value is not an object.
    """
    config.get(key)
    return config.sub(key)


def either(config: ConfigReader, *keys: str, default: Any = None) -> tuple[str, Any]:
    """Which of `keys`, spellings of one setting, is there, and its value.

    Raises:
        ConfigError: two are there and disagree.
    """
    found = [(key, value) for key in keys if (value := config.get(key)) is not None]
    for key, value in found[1:]:
        if value != found[0][1]:
            raise config.error(key, f"disagrees with {found[0][0]}={found[0][1]!r}")
    return found[0] if found else (keys[0], default)


def group_size(config: ConfigReader, *keys: str, default: int | None = None) -> int:
    """Columns that share a scale; -1: all of a row.

    Raises:
        ConfigError: no positive integer nor -1.
    """
    key, value = either(config, *keys, default=default)
    if type(value) is not int or (value <= 0 and value != -1):
        raise config.error(key, "must be a positive number of columns, or -1 for all")
    return value


def kv_cache_scheme(config: ConfigReader, key: str = "kv_cache_scheme") -> KVCacheScheme | None:
    """What compressed-tensors, AutoFP8 and ModelOpt say of the KV cache; None where it stays as
    it is.

    Raises:
        ConfigError: anything but static float8_e4m3 with a scale for each layer or head.
    """
    if config.get(key) in ("static", "FP8"):  # all that AutoFP8 and ModelOpt 0.31 to 0.33 say
        return KVCacheScheme()
    scheme = nested(config, key)
    if scheme is None:
        return None
    choice(scheme, "num_bits", [8])
    choice(scheme, "type", ["float"])
    choice(scheme, "dynamic", [False], False)
    choice(scheme, "symmetric", [True], True)
    refuse_groups(scheme, "actorder", "block_structure", "group_size")
    strategy = choice(scheme, "strategy", ["tensor", "attn_head"], "tensor")
    scheme.require_all_read(CALIBRATION)
    return KVCacheScheme(per="head" if strategy == "attn_head" else "tensor")


def refuse_groups(arguments: ConfigReader, *keys: str) -> None:
    """Holds that compressed-tensors' arguments of no weight have none of a weight's groups.

    Raises:
        ConfigError: one of the keys says something.
    """
    for key in keys:
        choice(arguments, key, [None, False] if key == "actorder" else [None])


def refuse_transforms(config: ConfigReader) -> None:
    """Holds that GPTQModel changed no more than how weights are stored: it rotates inputs of some
    products, and adds low-rank ones. What else its `meta` holds says how values were found.

    Raises:
        ConfigError: an `adapter` or a `rotation`, in `meta` too.
    """
    for place in filter(None, (config, nested(config, "meta"))):
        for key in ("adapter", "rotation"):
            choice(place, key, [None])


CALIBRATION = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
"""Keys of compressed-tensors' arguments that say how scales were found, and in which types they are
stored, which the tensors tell."""
