"""What a model cannot do without: bytes that must be read and multiplications that must be done, of
one rank.

A decode step reads every weight but the embedding table once (a head that is tied to it is read),
of each layer of experts those that are routed to, and the keys and values of every context. Each
token is multiplied with every weight that it meets, each sampled one with the head. Weights that
are loaded count as kernels are given them, others as the checkpoint stores them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rackmount_registry.mount import Draft
from rackmount_registry.nn import Embedding, Experts
from rackmount_registry.nn.socket import Socket
from rackmount_registry.nn.storage import StoredWeight

Params = Mapping[str, int]
"""Weight format -> parameters that are stored so."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The experts of one layer, or those of them that this rank holds."""

    count: int
    """Of all ranks."""
    top_k: int
    bytes: int
    params: int
    format: str

    def distinct(self, num_tokens: int) -> float:
        """Experts, on average, that so many tokens choose which are routed at random."""
        return self.count * (1 - (1 - self.top_k / self.count) ** num_tokens)

    def bytes_read(self, distinct: float) -> float:
        """By a step that touches so many of all experts."""
        return self.bytes * distinct / self.count

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
    dense_params: Params
    """Multiplied with every token."""
    head_params: Params
    """Multiplied with every sampled token."""
    experts: tuple[ExpertLayer, ...]
    attention: tuple[AttentionLayer, ...]

    def weight_bytes(self, num_tokens: int, distinct: Sequence[float] = ()) -> float:
        """Bytes of weights that a step of so many tokens reads.

        `distinct` has for each layer of experts how many of them the step touches; if it is empty,
        routing counts as random.
        """
        touched = distinct or [each.distinct(num_tokens) for each in self.experts]
        pairs = zip(self.experts, touched, strict=True)
        return self.dense_bytes + sum(each.bytes_read(number) for each, number in pairs)

    def flops(self, num_tokens: int, num_sampled: int) -> dict[str, float]:
        """Floating point operations of a step's matrix products by weight format, attention left
        out."""
        flops: dict[str, float] = defaultdict(float)
        for form, count in self.dense_params.items():
            flops[form] += 2 * count * num_tokens
        for each in self.experts:
            flops[each.format] += 2 * each.params_per_token * num_tokens
        for form, count in self.head_params.items():
            flops[form] += 2 * count * num_sampled
        return flops

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
        dense_params=_params(w for _, w in weights if w.role != "head"),
        head_params=_params(w for _, w in weights if w.role == "head"),
        experts=tuple(_experts(s, draft) for s in draft.sockets if isinstance(s, Experts)),
        attention=tuple(
            AttentionLayer(
                kv_bytes_per_token=spec.bytes_per_token,
                query_size=layer.params.num_heads * layer.params.head_size,
                window=layer.params.sliding_window,
            )
            for layer, spec in zip(draft.attention, draft.cache_specs(), strict=True)
        ),
    )


def _dense_bytes(socket: Socket, draft: Draft) -> int:
    """Of all that the socket reads, experts left out; a tied head reads a table of another."""
    if isinstance(socket, Embedding):
        return 0
    weights = list(socket.weights())
    inside = {id(s) for w in weights for s in w.storages.values()}
    others = [storage for storage in socket.storages() if id(storage) not in inside]
    dense = [weight for weight in weights if weight.role != "expert"]
    return sum(weight.num_bytes(draft.dtype) for weight in dense) + sum(
        storage.num_bytes(draft.dtype) for storage in others
    )


def _experts(socket: Experts, draft: Draft) -> ExpertLayer:
    weights = [weight for weight in socket.weights() if weight.role == "expert"]
    (form,) = {weight.stored.yields for weight in weights}
    return ExpertLayer(
        count=socket.experts.count,
        top_k=socket.routing.top_k,
        bytes=sum(weight.num_bytes(draft.dtype) for weight in weights),
        params=socket.local.size * sum(map(_size, weights)),
        format=form,
    )


def _params(weights: Iterable[StoredWeight]) -> Params:
    params: Counter[str] = Counter()
    for weight in weights:
        params[weight.stored.yields] += _size(weight)
    return params


def _size(weight: StoredWeight) -> int:
    """Parameters of one logical weight, or of one expert's."""
    return sum(weight.parts) * weight.in_features
