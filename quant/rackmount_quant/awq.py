"""Quantization scheme "awq": 4-bit groups as AutoAWQ packs them, in the version "gemm".

`NAME.qweight` int32 [in, out / 8] and `NAME.qzeros` int32 [groups, out / 8] hold eight rows a word:
its fields, from the lowest, are rows 0, 2, 4, 6, 1, 3, 5, 7. `NAME.scales` is [groups, out], and a
weight (value - zero) * scale. See `awq/modules/linear/gemm.py` of casper-hansen/AutoAWQ.
"""

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from rackmount_quant.grouped import group_bytes, group_weight
from rackmount_quant.names import read_names, substrings
from rackmount_quant.packing import pack, unpack
from rackmount_quant.rounding import round_groups
from rackmount_quant.settings import choice, either, group_size, refuse_transforms
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import Dim, KVCacheScheme, Role, Slot, StoredFormat, Weight

BITS, PER_WORD = 4, 8

HARMLESS_BY_REASON = {
    "how scales were found": """
        act_group_aware batch_size block_name_to_quantize cache_block_outputs damp_percent dataset
        model_seqlen module_name_preceding_first_block pack_impl pad_token_id tokenizer
        true_sequential""",
    "how other engines run it": """
        do_fuse exllama_config fuse_max_seq_len max_input_length modules_to_fuse""",
    "settings for GPTQ, which transformers 5 adds": "desc_act modules_in_block_to_quantize sym",
}
HARMLESS = frozenset(" ".join(HARMLESS_BY_REASON.values()).split())


class AwqScheme:
    """See `rackmount_registry.formats.QuantizationScheme`. Routers and heads are plain, and
    whatever has an entry of `modules_to_not_convert` in its name."""

    kv_cache: KVCacheScheme | None = None

    def __init__(self, config: ConfigReader) -> None:
        """
        Raises:
            ConfigError: another number of bits or another layout than "gemm", values of the wrong
                kind, or unknown keys.
        """
        either(config, "quant_method", "method")  # GPTQModel writes both
        self._error = config.error
        self._bits, bits = either(config, "bits", "w_bit")
        if bits != BITS:
            raise config.error(self._bits, f"must be {BITS}, as AWQ has no other")
        choice(config, "pack_dtype", ["int32"], "int32")
        for key in ("version", "format", "checkpoint_format"):
            _, version = either(config, key, default="gemm")
            if not isinstance(version, str) or version.lower() != "gemm":
                raise config.error(key, "is another layout than 'gemm', which alone is read")
        choice(config, "backend", ["auto", "autoawq"], "auto")
        choice(config, "lm_head", [False], False)
        choice(config, "dynamic", [None, {}])
        refuse_transforms(config)
        spellings = "group_size", "q_group_size"
        self._group = group_size(config, *spellings, default=128)
        self._columns, _ = either(config, *spellings)
        self._zero_point = choice(config, "zero_point", [True, False], True)
        self._plain = read_names(config, "modules_to_not_convert", kind=substrings)
        config.require_all_read(HARMLESS)

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The format of groups.

        Raises:
            ConfigError: rows that do not fill words, or columns that do not fill groups.
        """
        if role in ("router", "head") or name in self._plain:
            return None
        out, size = shape
        if out % PER_WORD:
            raise self._error(self._bits, f"puts {PER_WORD} rows in a word, and {name} has {out}")
        if self._group > 0 and size % self._group:
            rule = f"means groups of {self._group} columns, and {name} has {size}"
            raise self._error(self._columns, rule)
        return awq_format(self._group, zero_point=self._zero_point)

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Entries of the list of exclusions that mean none of `modules`."""
        return self._plain.unmet(modules)


def awq_format(group: int, *, zero_point: bool = True) -> StoredFormat:
    """Groups of `group` columns, -1 for all. Without `zero_point` a checkpoint may leave out the
    zero points, which are 8 then."""
    groups = Dim("fixed") if group == -1 else Dim("in", group)
    return StoredFormat(
        f"awq of 4 bits, group {group}",
        (
            Slot("qweight", (Dim("in"), Dim("out", PER_WORD)), "int32"),
            Slot("qzeros", (groups, Dim("out", PER_WORD)), "int32", optional=not zero_point),
            Slot("scales", (groups, Dim("out")), "float32"),
        ),
        "int4_groups",
        partial(_finish, group),
        partial(_encode, group, zero_point),
        held_bytes=group_bytes(BITS, group),
    )


def _finish(
    group: int, tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int
) -> Weight:
    zeros = tensors.get("qzeros")
    return group_weight(
        pack(_rows(tensors["qweight"]), BITS),
        tensors["scales"].mT,
        None if zeros is None else _rows(zeros),
        bits=BITS,
        group=group,
        parts=parts,
        in_features=in_features,
    )


def _encode(group: int, zero_point: bool, dense: Tensor) -> dict[str, Tensor]:
    size = dense.shape[-1] if group == -1 else group
    values, scales, zeros = round_groups(
        dense, BITS, size, symmetric=not zero_point, dtype=torch.float16
    )
    return {
        "qweight": _words(values),
        "qzeros": _words(zeros),
        "scales": scales.mT.contiguous(),
    }


def _rows(words: Tensor) -> Tensor:
    """uint8 [..., out, k] from words [..., k, out / 8]."""
    return unpack(words, BITS).unflatten(-1, (-1, 2, 4)).mT.flatten(-3).mT


def _words(rows: Tensor) -> Tensor:
    """Words [k, out / 8] from uint8 [out, k]."""
    return pack(rows.mT.unflatten(-1, (-1, 4, 2)).mT.flatten(-3), BITS)
