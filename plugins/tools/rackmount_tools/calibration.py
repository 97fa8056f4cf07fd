"""From a model and a text to a checkpoint with scales and rounded weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rackmount import EngineConfig, Rack, draft_rack, locate, open_model
from rackmount_registry.attention import FP8
from rackmount_registry.checkpoint import Checkpoint, Report, silent
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import QuantizationScheme
from rackmount_registry.errors import ConfigError, RackmountError, did_you_mean
from rackmount_registry.formats import QuantizationScheme as QuantizationSchemePart
from rackmount_registry.plugins import PluginManager
from rackmount_tools.checkpoint_folder import (
    Written,
    copy_companions,
    new_folder,
    write_json,
    write_tensors,
)
from rackmount_tools.compressed_config import (
    GROUPED,
    KV_STRATEGIES,
    METHOD,
    ROUNDINGS,
    STATIC,
    kv_cache_scheme,
    quantization_config,
    transform_config,
)
from rackmount_tools.machine import require_device
from rackmount_tools.observed import Observed, observe
from rackmount_tools.perplexity import DEFAULT_CONTEXT, leading_token, windows_of
from rackmount_tools.rounded_tensors import RoundedTensors, formats_of

SECTION = "quantization_config"
TRANSFORMS = "transform_config"
DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is asked for.

    Raises:
        ConfigError: a word that is none of the legal ones, nothing to do, or what only other
            weights have.
    """

    kv_scales: str = "tensor"
    """What has a scale of its own: "tensor" or "head"; or "none"."""
    key_maps: bool = False
    """Whether queries and keys are mapped, so that rounding keys costs less."""
    weights: str = "none"
    """One of `ROUNDINGS`."""
    activations: str = "dynamic"
    """Whether scales of inputs are found while the model runs, or now: "static"."""
    group_size: int | None = None
    """Columns with one scale, of `GROUPED`; None: `DEFAULT_GROUP_SIZE`."""

    def __post_init__(self) -> None:
        for name, legal in (
            ("kv_scales", (*KV_STRATEGIES, "none")),
            ("weights", (*ROUNDINGS, "none")),
            ("activations", ("dynamic", "static")),
        ):
            value = getattr(self, name)
            if value not in legal:
                raise ConfigError(
                    f"{name}={value!r}{did_you_mean(value, legal)} must be one of "
                    f"{', '.join(legal)}"
                )
        if self.key_maps and self.kv_scales == "none":
            raise ConfigError(
                "key_maps=True maps keys for scales, and kv_scales='none' has none; choose "
                f"kv_scales={' or '.join(map(repr, KV_STRATEGIES))}"
            )
        if self.kv_scales == self.weights == "none":
            raise ConfigError("kv_scales='none' and weights='none' leave nothing to do")
        if self.static and self.weights not in STATIC:
            raise ConfigError(
                f"activations='static' with weights={self.weights!r}: inputs have one scale with "
                f"weights={', '.join(STATIC)}"
            )
        if self.group_size is not None and self.weights not in GROUPED:
            raise ConfigError(
                f"group_size={self.group_size} with weights={self.weights!r}: groups of columns "
                f"have scales with weights={', '.join(GROUPED)}"
            )

    @property
    def num_columns(self) -> int:
        """Of a group."""
        return DEFAULT_GROUP_SIZE if self.group_size is None else self.group_size

    @property
    def static(self) -> bool:
        return self.activations == "static"

    @property
    def needs_data(self) -> bool:
        return self.static or self.kv_scales != "none"


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What was done."""

    seen: Observed
    num_rounded: int
    """Logical weights."""
    written: Written


def write_calibrated(
    config: EngineConfig,
    out: Path,
    asked: Calibration,
    manager: PluginManager,
    *,
    text: str | None = None,
    max_tokens: int | None = None,
    report: Report = silent,
) -> Calibrated:
    """Writes the checkpoint; refuses what it can before any weight is read.

    Args:
        config: of the model; what is read at a time has `max_model_len` tokens, or by default
            `DEFAULT_CONTEXT` and no more than the model has room for.
        text: None where no data is needed.
        max_tokens: of the text, the first ones; None for all.

    Raises:
        ConfigError: a folder with something in it, a model that is quantized in another way, a
            weight whose shape the format cannot store, static inputs of experts, or no text where
            one is needed.
        CheckpointError: see its text.
        RackmountError: the model gives NaN, or its weights are not finite.
    """
    path = locate(config.model, manager, report)
    checkpoint = open_model(path, manager, "auto")
    try:
        rack = _drafted(config, checkpoint, manager)
        section = _section(checkpoint, rack, asked)
        scheme = _scheme(section, manager) if asked.weights != "none" else None
        formats = formats_of(rack.draft, scheme) if scheme else {}
        if asked.key_maps:
            section[TRANSFORMS] = transform_config(
                {
                    layer.index: (layer.path.rpartition(".")[0], layer.params.head_size)
                    for layer in rack.draft.attention
                }
            )
        with new_folder(out) as folder:
            sequences = _sequences(checkpoint, rack, text, max_tokens) if asked.needs_data else []
            per_head = asked.kv_scales == "head"
            seen = observe(
                rack,
                checkpoint,
                sequences,
                report,
                per_head=per_head,
                inputs=asked.static,
                key_maps=asked.key_maps,
            )
            _require_finite(seen)
            stored = checkpoint.config.get(SECTION) or {}
            seen.maps_left_out = TRANSFORMS in stored and not asked.key_maps
            tensors = RoundedTensors(
                rack=rack,
                checkpoint=checkpoint,
                formats=formats,
                per_head=None if asked.kv_scales == "none" else per_head,
                static=asked.static,
                seen=seen,
            )
            written = write_tensors(folder, _reported(tensors, report))
            _write_tokenizer(path, checkpoint, config, folder)
            write_json(folder / "config.json", _model_config(checkpoint, rack) | {SECTION: section})
    finally:
        checkpoint.close()
    return Calibrated(seen=seen, num_rounded=len(formats), written=written)


def _drafted(config: EngineConfig, checkpoint: Checkpoint, manager: PluginManager) -> Rack:
    """The rack that the text runs through, a window of `max_model_len` tokens at a time."""
    rack = draft_rack(config, checkpoint.config, manager)
    require_device(rack)
    if rack.kv_dtype == FP8:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} makes the cache FP8, and scales are of keys "
            "and values as they are; choose kv_cache_dtype='model'"
        )
    if config.max_model_len is None:
        return replace(rack, max_model_len=min(DEFAULT_CONTEXT, rack.max_model_len))
    return rack


def _section(checkpoint: Checkpoint, rack: Rack, asked: Calibration) -> dict[str, Any]:
    """The new checkpoint's quantization_config."""
    stored: Mapping[str, Any] | None = checkpoint.config.get(SECTION)
    if stored is not None:
        method = stored.get("quant_method")
        if method != METHOD or asked.weights != "none":
            raise ConfigError(
                f"the model is quantized already ({method!r}); of such, scales of the KV cache can "
                f"be added to those of {METHOD!r} with weights='none'"
            )
        kept = {key: value for key, value in stored.items() if key != TRANSFORMS}
        return kept | {"kv_cache_scheme": kv_cache_scheme(asked.kv_scales)}
    weights = [weight for socket in rack.draft.sockets for weight in socket.weights()]
    if asked.static and any(weight.role == "expert" for weight in weights):
        raise ConfigError(
            "activations='static': the second product of an expert takes what no layer shows; "
            "choose activations='dynamic' for a model with experts"
        )
    return quantization_config(
        weights=asked.weights,
        static=asked.static,
        group_size=asked.num_columns,
        kv_scales=asked.kv_scales,
        ignore=[n for w in weights if w.role in ("head", "router") for n in w.names],
    )


def _scheme(section: Mapping[str, Any], manager: PluginManager) -> QuantizationSchemePart:
    """What reads the section says how it is written."""
    scheme: QuantizationSchemePart = manager.claimed(QuantizationScheme, METHOD).load()(
        ConfigReader(section, SECTION)
    )
    return scheme


def _sequences(
    checkpoint: Checkpoint, rack: Rack, text: str | None, max_tokens: int | None
) -> list[list[int]]:
    """The text in pieces, each with what stands before a text."""
    if text is None:
        raise ConfigError(
            "data is needed to find scales: name a file of text as data, or choose "
            "kv_scales='none' and activations='dynamic', which need none"
        )
    tokenizer = checkpoint.tokenizer(trust_remote_code=rack.config.trust_remote_code)
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer to read a text with")
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)[:max_tokens]
    bos = leading_token(tokenizer)
    room = rack.max_model_len - (bos is not None)
    return [window.token_ids for window in windows_of(ids, rack.max_model_len, room, bos)]


def _require_finite(seen: Observed) -> None:
    tables: dict[str, Mapping[Any, Tensor]] = {
        "keys of layer": {index: each.largest for index, each in seen.keys.items()},
        "values of layer": {index: each.largest for index, each in seen.values.items()},
        "inputs of": seen.inputs,
    }
    for what, table in tables.items():
        for where, largest in table.items():
            if not bool(largest.isfinite().all()):
                reached = largest.amax().item()
                raise RackmountError(f"{what} {where} reach {reached} on this data")


def _reported(tensors: RoundedTensors, report: Report) -> Iterator[tuple[str, Tensor]]:
    for done, (name, tensor) in enumerate(tensors):
        report("write", done, None)
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise RackmountError(f"{name} would not be finite, as the model's weight is not")
        yield name, tensor


def _write_tokenizer(
    path: Path, checkpoint: Checkpoint, config: EngineConfig, folder: Path
) -> None:
    """Whatever lies beside the weights; or, of a model in one file, its tokenizer and what it
    says of sampling."""
    source = path if path.is_dir() else path.parent
    if (source / "config.json").is_file():
        copy_companions(source, folder)
        return
    tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if checkpoint.generation_config:
        write_json(folder / "generation_config.json", checkpoint.generation_config)


def _model_config(checkpoint: Checkpoint, rack: Rack) -> dict[str, Any]:
    key = "dtype" if checkpoint.config.get("dtype") is not None else "torch_dtype"
    return {**checkpoint.config, key: str(rack.dtype).removeprefix("torch.")}
