"""What a started engine says of itself, and the words that `explain` shares with it."""

from rackmount.decisions import decisions
from rackmount.engine.core import EngineCore
from rackmount.execution.memory import size
from rackmount.execution.saturation import TOO_MANY, TOO_MANY_ZEROS, misfits
from rackmount.rack import Rack, dtype_name
from rackmount_registry.attention import FP8
from rackmount_registry.errors import listed
from rackmount_registry.plugins import PluginManager


def startup_report(rack: Rack, core: EngineCore, manager: PluginManager) -> list[str]:
    """What was mounted and why, and what the memory holds; a line each."""
    each = " on each rank" if rack.num_ranks > 1 else ""
    return [
        headline(rack),
        *map(str, decisions(rack, manager)),
        f"weights: {size(rack.draft.weight_bytes)}{each} ({size(core.weight_bytes_read)} read)",
        *unmet_names(rack),
        *kv_scales(rack),
        *saturation(core),
        *capacity(rack, core.num_kv_blocks),
        graphs(rack),
    ]


def headline(rack: Rack) -> str:
    """The model and how it runs."""
    ranks = f", {rack.num_ranks} ranks" if rack.num_ranks > 1 else ""
    return f"{rack.config.model} in {dtype_name(rack.dtype)} on {rack.device}{ranks}"


def unmet_names(rack: Rack) -> list[str]:
    """What the checkpoint's quantization_config names in vain."""
    if not (unmet := rack.draft.unmet()):
        return []
    names = listed([repr(each) for each in unmet])
    return [f"quantization_config names {names}: no tensor of this model is meant"]


def kv_scales(rack: Rack) -> list[str]:
    """Where the scales of an FP8 KV cache come from, or that those of the checkpoint are left."""
    cache, scheme = rack.draft.kv_cache, rack.draft.scheme
    if cache.dtype != FP8:
        left = f"KV cache in {dtype_name(cache.dtype)}: the checkpoint's FP8 scales are not used"
        return [left] if scheme and scheme.kv_cache else []
    each = "KV head" if cache.per == "head" else "layer"
    own = f"the checkpoint's, which must have one for each {each}"
    source = own if cache.scale is None else f"{cache.scale} for all"
    mapped = "" if cache.key_map_names is None else "; keys and queries mapped"
    return [f"KV cache in {dtype_name(FP8)}, scales: {source}{mapped}"]


def saturation(core: EngineCore) -> list[str]:
    """What the start-up check of an FP8 KV cache found; nothing of another cache."""
    if not core.saturation:
        return []
    if wrong := misfits(core.saturation, core.num_tried):
        return [f"WARNING: {each}" for each in wrong]
    return [
        f"KV scales hold {core.num_tried} random tokens: no layer has more than {TOO_MANY:.2%} of "
        f"its keys or values stored as the largest FP8 number, or {TOO_MANY_ZEROS:.0%} as 0; real "
        "text may reach further"
    ]


def capacity(rack: Rack, num_kv_blocks: int) -> list[str]:
    """What so many blocks are good for."""
    num_tokens, length = num_kv_blocks * rack.block_size, rack.max_model_len
    most = full_requests(rack, num_kv_blocks)
    given = "kv_cache_memory_bytes" if rack.config.num_kv_blocks is None else "num_kv_blocks"
    each = " on each rank" if rack.num_ranks > 1 else ""
    return [
        f"KV memory: {size(num_tokens * rack.kv_bytes_per_token)}{each}",
        f"KV cache: {num_tokens} tokens ({num_kv_blocks} blocks of {rack.block_size})",
        f"at most {most} requests of {length} tokens"
        if most
        else f"no request of the full {length} tokens fits, and answers end before: raise {given}, "
        f"or lower max_model_len to {num_tokens}",
    ]


def graphs(rack: Rack) -> str:
    """Which steps are captured, or why none is."""
    if rack.eager_because:
        return f"CUDA graphs: none, {rack.eager_because}"
    decode, mixed = rack.decode_sizes, rack.mixed_sizes
    return (
        f"CUDA graphs: decode steps of {decode[0]} to {decode[-1]} requests ({len(decode)} sizes), "
        + (f"mixed steps of up to {mixed[-1]} tokens" if mixed else "no mixed steps")
    )


def full_requests(rack: Rack, num_kv_blocks: int) -> int:
    """Most requests at once that all reach the full length."""
    return min(num_kv_blocks // rack.blocks_per_sequence, rack.config.max_num_seqs)
