"""Quantization scheme "w8": int8 rows with one float32 scale each, rounded to nearest.

`quantization_config` is `{"quant_method": "w8", "ignore": [...]}`. A quantized weight is stored as
`NAME.weight`, int8 [out, in], and `NAME.weight_scale`, float32 [out]. Routers and heads are never
quantized.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rackmount_quant.names import read_names
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import Dim, KVCacheScheme, Role, Slot, StoredFormat, Weight
from rackmount_registry.scales import check_scales


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values int8 [..., out, in] and scales float32 [..., out] of a weight [..., out, in].

    A scale is the row's largest magnitude / 127; a row of zeros has scale 1.
    """
    wide = weight.to(torch.float32)
    scales = wide.abs().amax(-1) / 127
    scales = scales.where(scales > 0, 1)
    values = wide / scales.unsqueeze(-1)
    return values.round().clamp(-127, 127).to(torch.int8), scales


def _finish(tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int) -> Weight:
    scales = check_scales(tensors["weight_scale"], "weight_scale")
    return Weight("int8_rows", {"values": tensors["weight"], "scales": scales}, parts, in_features)


def _encode(dense: Tensor) -> dict[str, Tensor]:
    values, scales = quantize_rows(dense)
    return {"weight": values, "weight_scale": scales}


INT8_ROWS = StoredFormat(
    "w8",
    (
        Slot("weight", (Dim("out"), Dim("in")), "int8"),
        Slot("weight_scale", (Dim("out"),), "float32"),
    ),
    "int8_rows",
    _finish,
    _encode,
)


class W8Scheme:
    """See `rackmount_registry.formats.QuantizationScheme`. What `ignore` names stays plain (see
    `names.listed`)."""

    kv_cache: KVCacheScheme | None = None

    def __init__(self, config: ConfigReader) -> None:
        """
        Raises:
            ConfigError: `ignore` is not a list of strings or holds a broken pattern, or there are
                keys that this scheme does not know.
        """
        config.get("quant_method")
        self._ignored = read_names(config, "ignore")
        config.require_all_read()

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """Int8 rows, but None for routers, heads and what is ignored."""
        return None if role in ("router", "head") or name in self._ignored else INT8_ROWS

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Entries of `ignore` that mean none of `modules`."""
        return self._ignored.unmet(modules)
