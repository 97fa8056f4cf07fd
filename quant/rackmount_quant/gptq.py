"""Quantization scheme "gptq": groups of 4 or 8 bits as AutoGPTQ and GPTQModel pack them.

`NAME.qweight` int32 [in * bits / 32, out] holds columns of the weight one after another, from the
lowest bits on; `NAME.qzeros` int32 [groups, out * bits / 32] rows likewise, each zero point less
one in the checkpoint format "gptq", as it is in "gptq_v2"; `NAME.scales` is [groups, out] and
`NAME.g_idx` int32 [in] the group of each column. A weight is (value - zero) * scale. AutoGPTQ
stores a `NAME.bias` of zeros where the model has none. See `gptqmodel/nn_modules/qlinear` of
ModelCloud/GPTQModel.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rackmount_quant.grouped import group_bytes, group_weight
from rackmount_quant.names import Names, listed, passes
from rackmount_quant.packing import fields_per_word, pack, unpack, unpack_parts
from rackmount_quant.rounding import round_groups
from rackmount_quant.settings import choice, either, group_size, nested, refuse_transforms
from rackmount_registry.config import ConfigReader
from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import Dim, KVCacheScheme, Role, Slot, StoredFormat, Weight

HARMLESS_BY_REASON = {
    "how values were found": """
        act_group_aware autoround_version batch_size block_name_to_quantize cache_block_outputs
        damp_auto_increment damp_percent dataset failsafe fallback foem gptaq hessian hyb_act
        low_gpu_mem_usage model_file_base_name model_name_or_path model_seqlen
        module_name_preceding_first_block mse offload_to_disk pack_impl pad_token_id
        parallel_packing smooth smoother static_groups tokenizer true_sequential v2 v2_alpha""",
    "how other engines run it": """
        backend disable_exllama exllama_config max_input_length use_cuda_fp16 use_exllama""",
}
HARMLESS = frozenset(" ".join(HARMLESS_BY_REASON.values()).split())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a weight is stored."""

    bits: int
    group: int
    """-1: all columns of a row."""
    act_order: bool
    """Columns are in any group: `g_idx` says which."""
    symmetric: bool
    """Zero points are in the middle. They are stored all the same, and read as they are; but if all
    are one other number, the checkpoint's version is another."""
    zeros_less_one: bool

    @classmethod
    def read(cls, config: ConfigReader, default: "Layout | None" = None) -> "Layout":
        """From a configuration, or from what one changes of `default`."""
        base = default or cls(
            bits=0, group=128, act_order=False, symmetric=True, zeros_less_one=True
        )
        return replace(
            base,
            bits=choice(config, "bits", [4, 8], base.bits),
            group=group_size(config, "group_size", default=base.group),
            act_order=choice(config, "desc_act", [True, False], base.act_order),
            symmetric=choice(config, "sym", [True, False], base.symmetric),
        )


class GptqScheme:
    """See `rackmount_registry.formats.QuantizationScheme`.

    Routers are plain, heads without `lm_head`, what `modules_in_block_to_quantize` leaves out, and
    what a pattern of `dynamic` that begins with "-:" matches. Another pattern there, bare or with
    "+:", changes the layout of what it matches, from a name's start. The first match counts.
    """

    kv_cache: KVCacheScheme | None = None

    def __init__(self, config: ConfigReader) -> None:
        """
        Raises:
            ConfigError: a number of bits or a layout that is not read, values of the wrong kind, or
                unknown keys.
        """
        either(config, "quant_method", "method")  # GPTQModel writes both
        key, version = either(config, "checkpoint_format", "format", default="gptq")
        if version not in ("gptq", "gptq_v2"):
            raise config.error(key, "must be 'gptq' or 'gptq_v2'")
        choice(config, "is_marlin_format", [False], False)
        choice(config, "pack_dtype", ["int32"], "int32")
        refuse_transforms(config)
        self._layout = replace(Layout.read(config), zeros_less_one=version == "gptq")
        self._lm_head = choice(config, "lm_head", [True, False], False)
        self._only = _read_modules(config)
        self._dynamic = self._read_dynamic(config)
        config.require_all_read(HARMLESS)

    def _read_dynamic(
        self, config: ConfigReader
    ) -> dict[str, tuple[re.Pattern[str], Layout | None]]:
        """Entry -> its pattern, and the layout, None for plain."""
        rules = nested(config, "dynamic")
        found: dict[str, tuple[re.Pattern[str], Layout | None]] = {}
        for entry in config.get("dynamic") or {}:
            assert rules is not None
            sign, colon, rest = entry.partition(":")
            signed = colon and sign in ("+", "-")
            try:
                pattern = re.compile(rest if signed else entry)
            except re.error as error:
                raise config.error("dynamic", f"has a broken pattern: {error}") from error
            override = rules.sub(entry)
            layout = self._layout
            if override is not None:
                layout = Layout.read(override, layout)
                override.require_all_read(HARMLESS)
            found[entry] = pattern, None if signed and sign == "-" else layout
        return found

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        """The format of groups."""
        if role == "router" or (role == "head" and not self._lm_head):
            return None
        if role != "head" and self._only is not None and name not in self._only:
            return None
        layout: Layout | None = self._layout
        for pattern, changed in self._dynamic.values():
            if passes(pattern.match, name):
                layout = changed
                break
        return None if layout is None else gptq_format(layout, shape[1])

    def unmet(self, modules: Collection[str]) -> list[str]:
        """Patterns of `dynamic`, and names of what alone is quantized, that mean none of
        `modules`."""
        patterns = {entry: pattern.match for entry, (pattern, _) in self._dynamic.items()}
        only = self._only.unmet(modules) if self._only is not None else []
        return Names(tests=patterns).unmet(modules) + only


def _read_modules(config: ConfigReader) -> Names | None:
    """What alone is quantized, by last components of names; None: everything."""
    key = "modules_in_block_to_quantize"
    entries = config.get(key)
    if entries is None:
        return None
    rows = entries if isinstance(entries, list) else []
    lists = [entry if isinstance(entry, list) else [entry] for entry in rows]
    names = [name for names in lists for name in names]
    if not isinstance(entries, list) or not all(isinstance(name, str) for name in names):
        raise config.error(key, "must be a list of names, or of lists of names")
    return listed(names)


def gptq_format(layout: Layout, in_features: int) -> StoredFormat:
    """The format of a weight with `in_features` columns on all ranks together.

    With act-order any rank's columns may be in any group, so each has all scales.
    """
    size = in_features if layout.group == -1 else layout.group
    spread = layout.act_order and layout.group != -1
    # In order it is all read, so that each rank can hold its share against the whole.
    order = Dim("in") if spread else Dim("fixed", in_features)
    per = fields_per_word(layout.bits)
    if layout.group == -1 or spread:
        groups = Dim("fixed", -(-in_features // size))
    else:
        groups = Dim("in", size)
    kind = ", act-order" if spread else ""
    return StoredFormat(
        f"gptq of {layout.bits} bits, group {layout.group}{kind}",
        (
            Slot("qweight", (Dim("in", per), Dim("out")), "int32"),
            Slot("qzeros", (groups, Dim("out", per)), "int32"),
            Slot("scales", (groups, Dim("out")), "float32"),
            Slot("g_idx", (Dim("part"), order), "int32", optional=not spread),
            Slot("bias", (Dim("out"),), "float32", optional=True),
        ),
        f"int{layout.bits}_groups",
        partial(_finish, layout, spread),
        partial(_encode, layout),
        held_bytes=group_bytes(layout.bits, layout.group),
    )


def _finish(
    layout: Layout,
    spread: bool,
    tensors: Mapping[str, Tensor],
    parts: tuple[int, ...],
    in_features: int,
) -> Weight:
    bits, groups = layout.bits, tensors.get("g_idx")
    if (bias := tensors.get("bias")) is not None and (others := int(bias.count_nonzero())):
        raise CheckpointError(
            f"bias must be 0, as the model has none here, and {others} of {bias.numel()} values "
            "are not"
        )
    if groups is not None and not spread:
        _require_order(groups, layout.group)
        groups = None
    words = tensors["qweight"].mT.contiguous()
    zeros = unpack_parts(tensors["qzeros"], parts, bits)
    if layout.zeros_less_one:
        zeros = (zeros + 1) & (2**bits - 1)
    if layout.symmetric:
        _require_middle(zeros, bits, layout.zeros_less_one)
    return group_weight(
        words if bits == 4 else unpack(words, bits)[..., :in_features],
        tensors["scales"].mT,
        zeros.mT,
        bits=bits,
        group=layout.group,
        parts=parts,
        in_features=in_features,
        groups=groups,
    )


def _require_order(groups: Tensor, group: int) -> None:
    """Holds that the groups of all columns, of all ranks, follow one another from 0 on: each rank
    has so many of the scales then."""
    num_columns = groups.shape[-1]
    size = num_columns if group == -1 else group
    expected = torch.arange(num_columns, device=groups.device) // size
    if len(wrong := (groups != expected).flatten().nonzero()):
        at = int(wrong[0])
        raise CheckpointError(
            f"g_idx must be the column // {size}, as desc_act is not set, and of column "
            f"{at % num_columns} it is {int(groups.flatten()[at])}"
        )


def _require_middle(zeros: Tensor, bits: int, less_one: bool) -> None:
    """Holds that not all of symmetric zero points are beside the middle: then they were stored for
    another version, and would move every value."""
    middle, first = 1 << (bits - 1), int(zeros.flatten()[0])
    if first != middle and bool((zeros == first).all()):
        read = "gptq, which stores one less" if less_one else "gptq_v2"
        raise CheckpointError(
            f"qzeros are all {first} as checkpoint_format {read}, and {middle} by sym: one of the "
            "two is wrong"
        )


def _encode(layout: Layout, dense: Tensor) -> dict[str, Tensor]:
    bits, (_, size) = layout.bits, dense.shape
    group = size if layout.group == -1 else layout.group
    values, scales, zeros = round_groups(
        dense, bits, group, symmetric=layout.symmetric, dtype=torch.float16
    )
    if layout.zeros_less_one:
        zeros = (zeros - 1) & (2**bits - 1)
    return {
        "qweight": pack(values, bits).mT.contiguous(),
        "qzeros": pack(zeros.mT, bits),
        "scales": scales.mT.contiguous(),
        "g_idx": (torch.arange(size, device=dense.device) // group).int(),
    }
