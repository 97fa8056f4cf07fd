"""Quantization scheme "w8": int8 rows with one float32 scale each, rounded to nearest.

`quantization_config` is `{"quant_method": "w8", "ignore": [...]}`. A quantized weight is stored as
`NAME.weight`, int8 [out, in], and `NAME.weight_scale`, float32 [out]. Routers and heads are never
quantized.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import Dim, Role, Slot, StoredFormat, Weight

FUSED_NAMES = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Part -> the name under which other engines know its fused projection."""


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values int8 [..., out, in] and scales float32 [..., out] of a weight [..., out, in].

    A scale is the row's largest magnitude / 127; a row of zeros has scale 0.
    """
    wide = weight.to(torch.float32)
    scales = wide.abs().amax(-1) / 127
    values = wide / scales.where(scales > 0, 1).unsqueeze(-1)
    return values.round().clamp(-127, 127).to(torch.int8), scales


def _finish(tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int) -> Weight:
    named = {"values": tensors["weight"], "scales": tensors["weight_scale"]}
    return Weight("int8_rows", named, parts, in_features)


INT8_ROWS = StoredFormat(
    "w8",
    (
        Slot("weight", (Dim("out"), Dim("in")), "int8"),
        Slot("weight_scale", (Dim("out"),), "float32"),
    ),
    "int8_rows",
    _finish,
)


class W8Scheme:
    """See `rackmount_registry.formats.QuantizationScheme`.

    An entry of `ignore` is a whole name, or the last components of names ("down_proj",
    "mlp.down_proj"), or "re:" and a regular expression that matches from a name's start. A
    name may be that of one part of a fused projection, or of the fused one (`qkv_proj`,
    `gate_up_proj`), which stands for all its parts; a pattern is held against the parts alone.
    """

    kv_cache = None

    def __init__(self, config: ConfigReader) -> None:
        """
        Raises:
            ConfigError: `ignore` is not a list of strings or holds a broken pattern, or there are
                keys that this scheme does not know.
        """
        config.get("quant_method")
        ignore = config.get("ignore", [])
        if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
            raise config.error("ignore", "must be a list of names")
        config.require_all_read()
        try:
            self._patterns = [re.compile(p) for entry in ignore for p in _patterns(entry)]
        except re.error as error:
            raise config.error("ignore", f"has a broken regular expression: {error}") from error

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """Int8 rows, but None for routers, heads and what is ignored."""
        ignored = any(pattern.match(name) for pattern in self._patterns)
        return None if ignored or role in ("router", "head") else INT8_ROWS


def _patterns(entry: str) -> list[str]:
    """The regular expressions, matched from a name's start, that an entry of `ignore` stands for:
    one, or one for each part of a fused projection."""
    if entry.startswith("re:"):
        return [entry[3:]]
    owner, dot, last = entry.rpartition(".")
    parts = [part for part, fused in FUSED_NAMES.items() if fused == last]
    return [rf"(?:.*\.)?{re.escape(owner + dot + name)}$" for name in (last, *parts)]
