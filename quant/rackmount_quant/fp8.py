"""Quantization scheme "fp8": float8_e4m3fn weights of AutoFP8, DeepSeek and `transformers`; or made
from a plain checkpoint while it is loaded.

| configuration | stored |
| --- | --- |
| `weight_block_size` [128, 128] (DeepSeek, Qwen3) | `weight`, `weight_scale_inv` by block |
| `weight_block_size` null (`transformers`) | `weight`, `weight_scale_inv`, `activation_scale` |
| no `weight_block_size` (AutoFP8) | `weight`, `weight_scale`, `input_scale` |

Values are multiplied by their scale, whatever its name. The scale of inputs is there where
`activation_scheme` is "static". Block scales may be powers of two, stored as float8_e8m0fnu.
"""

from collections.abc import Collection

from rackmount_quant.eight_bits import FP8_ONLINE, fp8_blocks, fp8_rows
from rackmount_quant.names import Names, read_names
from rackmount_quant.settings import choice, kv_cache_scheme
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import BLOCK, KVCacheScheme, Role, StoredFormat

HARMLESS = frozenset({"dequantize"})
"""How `transformers` loads."""
ABSENT = object()


class Fp8Scheme:
    """See `rackmount_registry.formats.QuantizationScheme`. Routers and heads are plain, and what
    `modules_to_not_convert` or `ignored_layers` names (see `names.listed`).

    Args:
        config: None for a plain checkpoint: its weights are rounded, each row with a scale of its
            own, and inputs are rounded token by token.
    """

    def __init__(self, config: ConfigReader | None) -> None:
        """
        Raises:
            ConfigError: another FP8 format, other blocks than 128 x 128, values of the wrong kind,
                or unknown keys.
        """
        self.kv_cache: KVCacheScheme | None = None
        self._plain, self._stored = Names(), FP8_ONLINE
        if config is not None:
            self._plain = read_names(config, "modules_to_not_convert", "ignored_layers")
            self._stored = _read_format(config)
            self.kv_cache = kv_cache_scheme(config)
            config.require_all_read(HARMLESS)

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The one format, but None for routers, heads and what is ignored."""
        return None if role in ("router", "head") or name in self._plain else self._stored

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Entries of the list of exclusions that mean none of `modules`."""
        return self._plain.unmet(modules)


def _read_format(config: ConfigReader) -> StoredFormat:
    config.get("quant_method")
    choice(config, "fmt", ["e4m3"], "e4m3")
    choice(config, "expert_dtype", ["fp8"], "fp8")
    choice(config, "modules_to_convert", [None, []])
    static = choice(config, "activation_scheme", ["static", "dynamic"], "dynamic") == "static"
    ue8m0 = choice(config, "scale_fmt", ["float", "ue8m0"], "float") == "ue8m0"
    block = config.get("weight_block_size", ABSENT)
    if block is ABSENT:
        return fp8_rows("tensor", "tensor" if static else "token")
    if block is None:
        return fp8_rows(
            "tensor",
            "tensor" if static else "token",
            scale="weight_scale_inv",
            input_scale="activation_scale",
        )
    if block != [BLOCK, BLOCK]:
        raise config.error("weight_block_size", f"must be [{BLOCK}, {BLOCK}]")
    if static:
        raise config.error("activation_scheme", "must be 'dynamic' where weights have block scales")
    return fp8_blocks("group", scale="weight_scale_inv", power_of_two=ue8m0)
