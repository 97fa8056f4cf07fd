"""The rack as it will stand: every part chosen for a model, with reasons, before any memory is
taken."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rackmount.config import DTYPES, EngineConfig
from rackmount.execution.sizes import decode_sizes, mixed_limit, mixed_sizes
from rackmount.executors.choice import choose_executor
from rackmount_registry.attention import CACHE_LAYOUTS, FP8, KVCache
from rackmount_registry.axes import Mesh, Solo
from rackmount_registry.capabilities import Demand
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import (
    Architecture,
    AttentionBackend,
    Executor,
    GrammarBackend,
    QuantizationScheme,
)
from rackmount_registry.errors import ConfigError, PluginError, did_you_mean
from rackmount_registry.executor import Seat
from rackmount_registry.formats import QuantizationScheme as QuantizationSchemePart
from rackmount_registry.mount import Draft, PartsChoice, draft, select_parts
from rackmount_registry.offers import Offer, broken_note, legal_names, normalize
from rackmount_registry.options import GivenOptions, check_options, instantiate, parse_options
from rackmount_registry.plugins import PluginManager
from rackmount_registry.selection import AttentionChoice, choose_attention, first_in_order


@dataclass(frozen=True, kw_only=True)
class Rack:
    """What `explain` prints and the worker builds: of one rank, and alike on all."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    architecture: Offer[Architecture]
    scheme: Offer[QuantizationScheme] | None
    draft: Draft
    parts: PartsChoice
    attention: AttentionChoice
    executor: Offer[Executor]
    grammar: Offer[GrammarBackend] | None
    """None: requests for structured output are refused."""
    options: GivenOptions
    """Of the parts, as `plugin_config` gives them."""

    @property
    def num_ranks(self) -> int:
        return self.config.tp

    @property
    def eager_because(self) -> str:
        """Why decode steps are not captured in CUDA graphs; empty where they are."""
        if self.device.type != "cuda":
            return f"{self.device.type} has no CUDA graphs"
        if self.config.enforce_eager:
            return "enforce_eager was asked for"
        if self.num_ranks > 1:
            return "collectives within graphs are not proven yet"
        parts = [*self.parts.offers(), self.attention.decode]
        unsafe = dict.fromkeys(each.name for each in parts if not each.descriptor.graph_safe)
        return f"not graph-safe: {', '.join(unsafe)}" if unsafe else ""

    @property
    def captures_graphs(self) -> bool:
        """Whether decode steps are captured."""
        return not self.eager_because

    @property
    def decode_sizes(self) -> list[int]:
        """Batch sizes of the decode steps that are captured."""
        most = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        return decode_sizes(most) if self.captures_graphs else []

    @property
    def mixed_sizes(self) -> list[int]:
        """Numbers of tokens of the mixed steps that are captured."""
        config = self.config
        given = config.max_graph_tokens
        most = mixed_limit(self.draft) if given is None else given
        most = min(most, config.max_num_batched_tokens, self.max_model_len)
        return mixed_sizes(most) if most and self.captures_graphs else []

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        return self.draft.kv_cache.dtype

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.attention.block_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers of this rank."""
        return sum(spec.bytes_per_token for spec in self.draft.cache_specs())

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence at full length."""
        return -(-self.max_model_len // self.block_size)


def draft_rack(
    config: EngineConfig,
    model_config: Mapping[str, Any],
    manager: PluginManager,
    seat: Seat | None = None,
) -> Rack:
    """Chooses every part for the model of `model_config` (the content of config.json).

    Args:
        seat: the rank that drafts; None drafts rank 0 before there are ranks.

    Raises:
        PluginError: no mounted plugin has the architecture or the quantization scheme.
        ConfigError: a value of the model or the engine breaks a rule.
        SelectionError: no part fits, or one that was asked for does not.
    """
    reader = ConfigReader(model_config, f"config.json of {config.model}")
    architecture = manager.claimed(Architecture, _architecture(reader))
    device = torch.device(seat.device) if seat else _device(config)
    dtype = _dtype(config.dtype, reader)
    # A draft asks a group for nothing but its place and size.
    mesh = Mesh.tensor_parallel(seat.group if seat else Solo(size=config.tp))
    options = parse_options(config.plugin_config, manager.offers())
    scheme, scheme_part = _scheme(config, reader, manager, options)
    kv_cache = _kv_cache(config, dtype, scheme_part)
    drafted = draft(
        architecture.load(),
        reader,
        dtype=dtype,
        mesh=mesh,
        scheme=scheme_part,
        kv_cache=kv_cache,
    )
    demand = Demand(
        device=device.type,
        compute_capability=_capability(device),
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(kv_cache.dtype),
        num_ranks=1,
    )
    opted_in = _opted_in(config, manager)
    parts = select_parts(
        manager, drafted, demand, requested=config.requested_parts, opted_in=opted_in
    )
    attention = choose_attention(
        manager.offers(AttentionBackend),
        _attention_demand(drafted, demand),
        config.backend,
        config.block_size,
        opted_in,
        manager.broken,
    )
    _require_layout(attention)
    executor = choose_executor(manager, config.executor, config.tp, opted_in)
    grammar = choose_grammar_backend(config, manager)
    chosen = [*parts.offers(), attention.prefill, attention.decode, executor]
    check_options(options, [*chosen, *filter(None, (scheme, grammar))])
    return Rack(
        config=config,
        device=device,
        dtype=dtype,
        max_model_len=_max_model_len(config, reader, drafted),
        architecture=architecture,
        scheme=scheme,
        draft=drafted,
        parts=parts,
        attention=attention,
        executor=executor,
        grammar=grammar,
        options=options,
    )


def choose_grammar_backend(
    config: EngineConfig, manager: PluginManager
) -> Offer[GrammarBackend] | None:
    """The one called `config.grammar_backend`; for "auto" the first in order, if any is mounted.

    Raises:
        PluginError: an unknown name.
    """
    if config.grammar_backend != "auto":
        return manager.find(GrammarBackend, config.grammar_backend)
    able = [offer for offer in manager.offers(GrammarBackend) if not offer.missing()]
    return first_in_order(able, _opted_in(config, manager))


def _require_layout(attention: AttentionChoice) -> None:
    if attention.cache_layout not in CACHE_LAYOUTS:
        offer = attention.prefill
        raise PluginError(
            f"attention_backend {offer.name!r} of {offer.distribution} {offer.version} names the "
            f"cache layout {attention.cache_layout!r}; legal are {', '.join(CACHE_LAYOUTS)}"
        )


def _opted_in(config: EngineConfig, manager: PluginManager) -> frozenset[str]:
    """Distributions outside the project that "auto" may choose from."""
    names = frozenset(map(normalize, config.auto_plugins))
    mounted = {offer.distribution for offer in manager.offers()}
    for name in sorted(names - mounted):
        raise ConfigError(
            f"auto_plugins names {name!r}{did_you_mean(name, mounted)}, of which no part is "
            f"mounted; mounted: {', '.join(sorted(mounted))}{broken_note(manager.broken)}"
        )
    return names


def _architecture(reader: ConfigReader) -> str:
    names = reader.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise reader.error("architectures", "must be a list of one name")
    return str(names[0])


def _device(config: EngineConfig) -> torch.device:
    name = config.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} must be auto, cpu, cuda or cuda:N")
    if config.tp > 1 and device.index is not None:
        raise ConfigError(
            f"device={name!r} names one device, and tp={config.tp} ranks need one each; "
            f"choose device={device.type!r}"
        )
    return device


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _dtype(name: str, reader: ConfigReader) -> torch.dtype:
    if name == "auto":
        key = "torch_dtype" if reader.get("dtype") is None else "dtype"
        name = "float32" if reader.get(key) is None else reader.get(key)
        if name not in DTYPES[1:]:
            raise reader.error(key, f"must be one of {', '.join(DTYPES[1:])}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """As a user writes it."""
    return str(dtype).removeprefix("torch.")


def _scheme(
    config: EngineConfig, reader: ConfigReader, manager: PluginManager, options: GivenOptions
) -> tuple[Offer[QuantizationScheme] | None, Any]:
    stored = reader.sub("quantization_config")
    if stored is None:
        return _online_scheme(config, manager, options)
    if (file := reader.get("quantization_file")) is not None:
        stored = ConfigReader(reader.quantization_config, f"{file} of {config.model}", frozenset())
    method = stored.quant_method
    if config.quantization not in (None, method):
        raise ConfigError(
            f"quantization={config.quantization!r} is not how the checkpoint is stored, which is "
            f"{method!r}; leave it out, or give that"
        )
    if not isinstance(method, str):
        raise stored.error("quant_method", "must be the name of a method")
    offer = manager.claimed(QuantizationScheme, method)
    return offer, instantiate(offer, options, stored)


def _online_scheme(
    config: EngineConfig, manager: PluginManager, options: GivenOptions
) -> tuple[Offer[QuantizationScheme] | None, Any]:
    """The scheme that rounds a plain checkpoint while it is loaded, if one was asked for."""
    name = config.quantization
    if name is None:
        return None, None
    able = [offer for offer in manager.offers(QuantizationScheme) if offer.descriptor.online]
    if name not in (legal := legal_names(able)):
        raise ConfigError(
            f"quantization={name!r}{did_you_mean(name, legal)} is none of the mounted schemes that "
            f"round a plain checkpoint, as this one is, while it is loaded: "
            f"{', '.join(legal) or 'none'}{broken_note(manager.broken)}; `rackmount calibrate "
            "--weights` rounds to others, and writes a checkpoint"
        )
    offer = manager.find(QuantizationScheme, name)
    return offer, instantiate(offer, options, None)


def _kv_cache(
    config: EngineConfig, dtype: torch.dtype, scheme: QuantizationSchemePart | None
) -> KVCache:
    """What was asked for, or else what the checkpoint's scheme says."""
    stored = scheme.kv_cache if scheme else None
    maps = stored.key_map_names if stored else None
    wanted = config.kv_cache_dtype
    if wanted == "fp8" or (wanted == "auto" and stored is not None):
        scale = config.kv_scale
        if scale is None and config.load_format == "dummy":
            scale = 1.0
        per = stored.per if stored else "tensor"
        return KVCache(dtype=FP8, per=per, scale=scale, key_map_names=maps)
    if config.kv_scale is not None:
        raise ConfigError(
            f"kv_scale={config.kv_scale} is for an FP8 KV cache, and kv_cache_dtype={wanted!r} "
            f"makes it {dtype_name(dtype)}; choose kv_cache_dtype='fp8', or leave kv_scale out"
        )
    return KVCache(dtype=dtype, ignores_scales=wanted == "model", key_map_names=maps)


def _attention_demand(drafted: Draft, demand: Demand) -> Demand:
    """One demand for all attention layers: they share one KV group."""
    layers = drafted.attention_params
    sizes = sorted({layer.head_size for layer in layers})
    if len(sizes) != 1:
        raise ConfigError(
            f"attention layers with head sizes {sizes} need several KV groups; one is supported"
        )
    features = drafted.kv_cache.features.union(*(layer.features for layer in layers))
    return replace(demand, head_size=sizes[0], features=features, layers=frozenset(layers))


def _max_model_len(config: EngineConfig, reader: ConfigReader, drafted: Draft) -> int:
    claimed, wanted = reader.positive("max_position_embeddings"), config.max_model_len
    if wanted is None:
        return claimed
    ropes = [layer.rope.config for layer in drafted.attention if layer.rope is not None]
    stretched = [int((rope.original_max_position or 0) * rope.factor) for rope in ropes]
    known = max(claimed, min(stretched, default=0))
    if wanted > known:
        raise ConfigError(
            f"max_model_len={wanted} is above what the model knows; choose at most {known}"
        )
    return wanted
