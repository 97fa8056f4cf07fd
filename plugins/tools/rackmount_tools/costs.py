"""What a model cannot do without: bytes that must be read and multiplications that must be done, of
one rank.

A decode step reads every weight but the embedding table once (a head that is tied to it is read),
of each layer of experts those that are routed to, and the keys and values of every context. Each
token is multiplied with every weight that it meets, each sampled one with the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rackmount_registry.mount import Draft
from rackmount_registry.nn import Embedding, Experts
from rackmount_registry.nn.socket import Socket
from rackmount_registry.nn.storage import StoredWeight


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The experts of one layer, or those of them that this rank holds."""

    count: int
    """Of all ranks."""
    top_k: int
    bytes: int
    params: int

    def bytes_read(self, num_tokens: int) -> float:
        """By so many tokens, each routed to `top_k` experts at random."""
        return self.bytes * (1 - (1 - self.top_k / self.count) ** num_tokens)

    @property
    def params_per_token(self) -> float:
        return self.params / self.count * self.top_k


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    kv_bytes_per_token: int
    query_size: int
    """Heads times head size."""
    window: int | None

    def seen(self, contexts: np.ndarray) -> np.ndarray:
        """Tokens that the last one of each context sees."""
        return contexts if self.window is None else np.minimum(contexts, self.window)


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    dense_bytes: int
    """Read in every step, whatever its tokens."""
    dense_params: int
    """Multiplied with every token."""
    head_params: int
    """Multiplied with every sampled token."""
    experts: tuple[ExpertLayer, ...]
    attention: tuple[AttentionLayer, ...]

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        return self.dense_bytes + sum(each.bytes_read(num_tokens) for each in self.experts)

    def flops(self, num_tokens: int, num_sampled: int) -> float:
        """Floating point operations of a step's matrix products, attention left out."""
        per_token = self.dense_params + sum(each.params_per_token for each in self.experts)
        return 2 * (num_tokens * per_token + num_sampled * self.head_params)

    def kv_bytes(self, contexts: Sequence[int] | np.ndarray) -> float:
        """Bytes of keys and values that one token at the end of each context reads."""
        lengths = np.asarray(contexts)
        return float(sum((a.seen(lengths) * a.kv_bytes_per_token).sum() for a in self.attention))

    def attention_flops(self, length: int) -> float:
        """Floating point operations of causal attention over one whole prompt."""
        contexts = np.arange(1, length + 1)
        return float(sum(4 * a.query_size * a.seen(contexts).sum() for a in self.attention))


def costs_of(draft: Draft) -> ModelCosts:
    """The costs of a drafted model's share on this rank."""
    weights = [
        (socket, weight)
        for socket in draft.sockets
        for weight in socket.weights()
        if weight.role != "expert"
    ]
    return ModelCosts(
        dense_bytes=sum(_dense_bytes(s, draft) for s in draft.sockets),
        dense_params=sum(_params(w) for _, w in weights if w.role != "head"),
        head_params=sum(_params(w) for _, w in weights if w.role == "head"),
        experts=tuple(_experts(s, draft) for s in draft.sockets if isinstance(s, Experts)),
        attention=tuple(
            AttentionLayer(
                kv_bytes_per_token=layer.cache_spec(draft.dtype).bytes_per_token,
                query_size=layer.params.num_heads * layer.params.head_size,
                window=layer.params.sliding_window,
            )
            for layer in draft.attention
        ),
    )


def _dense_bytes(socket: Socket, draft: Draft) -> int:
    """Of all that the socket reads, experts left out; a tied head reads a table of another."""
    if isinstance(socket, Embedding):
        return 0
    weights = list(socket.weights())
    routed = {id(s) for w in weights if w.role == "expert" for s in w.storages.values()}
    read = chain(socket.storages(), *(w.storages.values() for w in weights))
    storages = {id(s): s for s in read if id(s) not in routed}
    return sum(storage.num_bytes(draft.dtype) for storage in storages.values())


def _experts(socket: Experts, draft: Draft) -> ExpertLayer:
    weights = [weight for weight in socket.weights() if weight.role == "expert"]
    storages = [storage for weight in weights for storage in weight.storages.values()]
    return ExpertLayer(
        count=socket.experts.count,
        top_k=socket.routing.top_k,
        bytes=sum(storage.num_bytes(draft.dtype) for storage in storages),
        params=socket.local.size * sum(map(_params, weights)),
    )


def _params(weight: StoredWeight) -> int:
    """Of one logical weight, or of one expert's."""
    return sum(weight.parts) * weight.in_features
