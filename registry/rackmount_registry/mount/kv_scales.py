"""The scales of an FP8 KV cache: found in the checkpoint by whatever name, checked, and cut.

Tensors of attention that is quantized beyond its cache, `q_scale` and `prob_output_scale`, are
answered for and not read: queries and probabilities are left as they are, which is more exact than
what those scales would round them to.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rackmount_registry.attention import FP8, KVScales
from rackmount_registry.checkpoint import Checkpoint
from rackmount_registry.errors import CheckpointError, listed
from rackmount_registry.mount.draft import Draft
from rackmount_registry.nn.attention import Attention
from rackmount_registry.scales import check_scales

SPELLINGS = (
    "{}_scale",  # compressed-tensors, AutoFP8
    "attn.{}_scale",
    "{}_proj.{}_scale",  # ModelOpt
    "{}_proj.output_scale",  # Quark, and compressed-tensors before
    "qkv_proj.{}_scale",
    "qkqkv_proj.{}_scale",
    "{}_cache.scale",
)
"""Beside the socket, with "k" or "v" in the braces; for queries "q"."""
OF_BOTH = "kv_scale"
"""AutoFP8's one scale for keys and values."""
OF_QUERIES = ("q.scale", "prob_output_scale")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the checkpoint holds for one layer."""

    k: tuple[str, ...]
    v: tuple[str, ...]
    """Scales, in every spelling; what is of keys and values alike stands in both."""
    zero_points: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def scales(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.k + self.v))

    @property
    def all(self) -> tuple[str, ...]:
        return self.scales + self.zero_points + self.unused


def read_kv_scales(draft: Draft, checkpoint: Checkpoint, device: torch.device) -> None:
    """Gives every attention layer the scales of its cache, if that is FP8, and makes it answer for
    the tensors of the checkpoint that have to do with them.

    Raises:
        CheckpointError: layers without scales, or scales that nothing uses, or two for one use; a
            scale of another shape, not finite or not above 0; a zero point that is not 0.
    """
    cache, layers = draft.kv_cache, draft.attention
    names = [_find(layer, checkpoint) for layer in layers]
    for layer, found in zip(layers, names, strict=True):
        layer.answered = found.all
    if cache.dtype != FP8:
        if not cache.ignores_scales:
            _refuse_unused(names, checkpoint)
        return
    if cache.scale is not None:
        _refuse_given(cache.scale, names, checkpoint)
        give_kv_scales(layers, cache.scale, device)
        return
    _require_all(layers, names)
    _require_alike(layers, names)
    for layer, found in zip(layers, names, strict=True):
        for name in found.zero_points:
            if bool(checkpoint.read(name).any()):
                file = checkpoint.tensors[name].file
                raise CheckpointError(f"{name} in {file} must be 0: an FP8 KV cache has no other")
        if (
            not found.k
            and cache.key_map_names
            and cache.key_map_names(layer.path.rpartition(".")[0])
        ):
            raise CheckpointError(
                f"{layer.sibling('k_scale')} is not in the checkpoint, whose quantization_config "
                "maps keys: a scale of values does not serve them"
            )
        pair = (found.k or found.v, found.v or found.k)  # one alone serves both
        k, v = (_read(layer, checkpoint, _single(each), cache.per) for each in pair)
        layer.kv_scales = KVScales(k=k.to(device), v=v.to(device))


def _require_alike(layers: tuple[Attention, ...], names: list[Names]) -> None:
    """One scale may serve a layer's keys and values, if that is how all layers have it."""
    lone = [layer for layer, found in zip(layers, names, strict=True) if not (found.k and found.v)]
    if lone and len(lone) < len(layers):
        found = names[layers.index(lone[0])]
        missing = lone[0].sibling("v_scale" if found.k else "k_scale")
        raise CheckpointError(
            f"{missing} is not in the checkpoint, where other layers have a scale of keys and one "
            "of values"
        )


def give_kv_scales(layers: Iterable[Attention], scale: float, device: torch.device) -> None:
    """The same scale for every layer's keys and values."""
    for layer in layers:
        heads = layer.params.num_kv_heads
        scales = torch.full((heads,), scale, dtype=torch.float32, device=device)
        layer.kv_scales = KVScales(k=scales, v=scales)


def _find(layer: Attention, checkpoint: Checkpoint) -> Names:
    def present(names: Iterable[str]) -> tuple[str, ...]:
        paths = (layer.sibling(name) for name in names)
        return tuple(path for path in paths if path in checkpoint.tensors)

    names = [OF_BOTH, *_spelled("k"), *_spelled("v")]
    return Names(
        k=present([*_spelled("k"), OF_BOTH]),
        v=present([*_spelled("v"), OF_BOTH]),
        zero_points=present(name.replace("scale", "zero_point") for name in names),
        unused=present([*_spelled("q"), *OF_QUERIES]),
    )


def _spelled(role: str) -> list[str]:
    return [name.format(role, role) for name in SPELLINGS]


def _single(names: tuple[str, ...]) -> str:
    if len(names) > 1:
        raise CheckpointError(f"{' and '.join(names)} are scales for one use; one must be there")
    return names[0]


def _read(layer: Attention, checkpoint: Checkpoint, name: str, per: str) -> Tensor:
    """float32 [G] of this rank."""
    info, num_heads = checkpoint.tensors[name], layer.kv_heads.count
    wanted = num_heads if per == "head" else 1
    if prod(info.shape) != wanted or max(info.shape, default=1) != wanted:
        rule = "one scale, unless quantization_config has one for each KV head"
        if per == "head":
            rule = "one for each KV head, as quantization_config says"
        raise CheckpointError(
            f"{name} in {info.file} has shape {list(info.shape)} and must have [{wanted}], {rule}; "
            "dimensions of 1 are of no matter"
        )
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} in {info.file} is {info.dtype}; a scale is one of {', '.join(DTYPES)}"
        )
    scales = check_scales(checkpoint.read(name).float().flatten(), f"{name} in {info.file}")
    heads = layer.local_kv_heads
    return scales.expand(num_heads)[heads.start : heads.stop].contiguous()


def _refuse_unused(names: list[Names], checkpoint: Checkpoint) -> None:
    if found := _listed([name for each in names for name in each.all], checkpoint):
        raise CheckpointError(
            f"the checkpoint has scales of quantized attention, {found}, and no "
            "quantization_config of it speaks of the KV cache; choose kv_cache_dtype='fp8' to use "
            "those of keys and values, or kv_cache_dtype='model' to leave them"
        )


def _refuse_given(scale: float, names: list[Names], checkpoint: Checkpoint) -> None:
    own = [name for each in names for name in each.scales]
    if found := _listed(own, checkpoint):
        raise CheckpointError(
            f"kv_scale={scale} was given, and the checkpoint has scales of its own, {found}; "
            "leave kv_scale out to use them"
        )


def _require_all(layers: tuple[Attention, ...], names: list[Names]) -> None:
    pairs = zip(layers, names, strict=True)
    missing = [layer.path.rpartition(".")[0] for layer, found in pairs if not found.scales]
    if not missing:
        return
    ways = ["choose kv_cache_dtype='model'", "calibrate the model"]
    if len(missing) == len(layers):
        ways.insert(0, "give kv_scale=1.0, by which all above 448 is cut off")
    raise CheckpointError(
        f"{len(missing)} of {len(layers)} attention layers have no scales for their FP8 KV cache "
        f"({listed(missing)}); {', or '.join(ways)}"
    )


def _listed(names: list[str], checkpoint: Checkpoint) -> str:
    """The first of them with its file; empty where there is none."""
    return listed([f"{name} in {checkpoint.tensors[name].file}" for name in names], 1)
