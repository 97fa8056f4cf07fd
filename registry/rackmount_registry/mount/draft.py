"""The draft of a model on one rank: constructed, named, surveyed and cut, with no memory taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rackmount_registry.attention import AttentionParams, CacheSpec, KVCache
from rackmount_registry.axes import Mesh, size_of
from rackmount_registry.config import ConfigReader
from rackmount_registry.formats import DENSE, QuantizationScheme, Role, StoredFormat
from rackmount_registry.nn.attention import Attention
from rackmount_registry.nn.embedding import OutputHead
from rackmount_registry.nn.experts import Experts
from rackmount_registry.nn.socket import Socket, Survey
from rackmount_registry.nn.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What `explain` needs and `assemble` builds on."""

    model: nn.Module
    dtype: torch.dtype
    kv_cache: KVCache
    sockets: tuple[Socket, ...]
    attention: tuple[Attention, ...] = ()
    """In the order of the model; their `index` is their place here."""
    scheme: QuantizationScheme | None = None
    """None: every weight is dense."""

    def storages(self) -> Iterator[Storage]:
        """Everything that the checkpoint fills on this rank."""
        yield from (storage for socket in self.sockets for storage in socket.storages())

    def in_filling_order(self) -> list[Socket]:
        """The sockets, tied heads last: such a one reads the table of an embedding."""
        return sorted(self.sockets, key=lambda s: isinstance(s, OutputHead) and bool(s.tied))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on this rank as kernels are given them: before they are loaded, by
        what their formats say."""
        left = {id(storage): storage for storage in self.storages()}
        total = 0
        for weight in (weight for socket in self.sockets for weight in socket.weights()):
            its = {id(storage) for storage in weight.storages.values()}
            if its <= left.keys():  # a tied head may have none of its own
                total += weight.num_bytes(self.dtype)
                for key in its:
                    del left[key]
        return total + sum(storage.num_bytes(self.dtype) for storage in left.values())

    def formats(self) -> dict[str, set[str]]:
        """Weight formats that kernels must take, as "linear" and "expert" -> names. A router's is
        made plain."""
        found: dict[str, set[str]] = {"linear": set(), "expert": set()}
        for weight in (weight for socket in self.sockets for weight in socket.weights()):
            if weight.role != "router":
                kind = "expert" if weight.role == "expert" else "linear"
                found[kind].add(weight.stored.yields)
        return found

    def unmet(self) -> list[str]:
        """Entries of the scheme's lists that mean no tensor of the model, on any rank."""
        ask = getattr(self.scheme, "unmet", lambda modules: ())  # there need not be one
        here = (piece.name for storage in self.storages() for piece in storage.pieces)
        others = (name for socket in self.sockets for name in socket.answers_for())
        return list(ask({name.rpartition(".")[0] for name in (*here, *others)}))

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return next(size_of(s.vocab) for s in self.sockets if isinstance(s, OutputHead))

    @property
    def experts(self) -> list[Experts]:
        """The layers of routed experts, in the order of the model."""
        return [socket for socket in self.sockets if isinstance(socket, Experts)]

    @property
    def attention_params(self) -> set[AttentionParams]:
        """The distinct attention layers, for the choice of a backend."""
        return {layer.params for layer in self.attention}

    def cache_specs(self, kv_dtype: torch.dtype | None = None) -> list[CacheSpec]:
        """What each attention layer keeps per token, or would with another dtype."""
        return [layer.cache_spec(kv_dtype or self.kv_cache.dtype) for layer in self.attention]


def draft(
    build: Callable[[ConfigReader], nn.Module],
    config: ConfigReader,
    *,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    scheme: QuantizationScheme | None = None,
    kv_cache: KVCache | None = None,
) -> Draft:
    """Constructs the model on `meta` and lays out this rank's share.

    Args:
        kv_cache: None for one of the model's dtype.

    Raises:
        ConfigError: a key that the model never read, a value it refuses, ranks that do not divide
        it, or a weight of a shape that the scheme does not store.
    """

    def format_of(name: str, shape: tuple[int, int], role: Role) -> StoredFormat:
        return (scheme.format_for(name, shape, role) if scheme else None) or DENSE

    with torch.device("meta"):
        model = build(config)
    config.require_all_read(getattr(model, "harmless", frozenset()))
    survey = Survey(mesh=mesh or Mesh(), format_of=format_of)
    sockets: list[Socket] = []
    for path, module in model.named_modules():
        if isinstance(module, Socket):
            module.path = path
            module.survey(survey)
            sockets.append(module)
    attention = [socket for socket in sockets if isinstance(socket, Attention)]
    for index, layer in enumerate(attention):
        layer.index = index
    return Draft(
        model=model,
        dtype=dtype,
        kv_cache=kv_cache or KVCache(dtype=dtype),
        sockets=tuple(sockets),
        attention=tuple(attention),
        scheme=scheme,
    )
