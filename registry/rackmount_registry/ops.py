"""The operations of an op set, each defined by a plain torch function: what every other
implementation must equal.

Shapes: T tokens, N features, H query heads, G key/value heads, D head size, K experts per token.
Arithmetic is in float32 at least (float64 stays), rounded to the dtype of the input at the end;
`rms_norm` also rounds before its weight, as the models were trained. T may be 0.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rackmount_registry.experts import Routing


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] / rms(x) * weight [N] (arXiv 1910.07467)."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); both [T, N]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each [T, N]; the inputs may be views of one wider tensor."""
    return (torch.nn.functional.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def rotary(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Head norms, where there are any, then rotary position embedding (arXiv 2104.09864).

    q [T, H, D], k [T, G, D]; positions int64 [T]; table float32 [max positions, 2, R / 2]: cosines,
    then sines, for the first R of the D features. `q_norm`, `k_norm` [D]. Halves are rotated
    against each other, or even and odd features where `interleaved`.
    """
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = table[positions].unsqueeze(1).unbind(2)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    turned, kept = _wide(x[..., :width]), x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((out.to(x.dtype), kept), -1)


def embedding(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows `ids - first` of weight [local vocabulary, N]; zeros for ids of other ranks. ids int64
    [T] -> [T, N]."""
    local = ids - first
    mine = (local >= 0) & (local < weight.shape[0])
    rows = (
        weight[local.where(mine, 0)]
        if weight.shape[0]
        else weight.new_zeros(len(ids), weight.shape[1])
    )
    return rows.where(mine.unsqueeze(-1), 0)


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Router logits [T, experts] -> ids int64 [T, K] by falling score, lowest id first at ties;
    weights float32 [T, K]."""
    scores = torch.softmax(_wide(logits), -1)
    # A stable sort, since topk leaves the order of ties open.
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.float() if weights.dtype != torch.float64 else weights


OPS = ("rms_norm", "add_rms_norm", "silu_mul", "rotary", "embedding", "route")
"""Names that an op set may offer."""


class Ops(Protocol):
    """The resolved operations of one engine: one callable per name in `OPS`, each from the op set
    chosen for it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...
    def rotary(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        table: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]: ...
    def embedding(self, ids: Tensor, weight: Tensor, first: int) -> Tensor: ...
    def route(self, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]: ...


def reference_ops() -> Ops:
    """This module's own functions, for the reference step and as the oracle of tests."""
    import sys

    return cast(Ops, cast(Any, sys.modules[__name__]))
