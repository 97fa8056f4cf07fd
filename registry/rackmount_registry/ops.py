"""The operations of an op set, each defined by a plain torch function: what every other
implementation must equal.

Shapes: T tokens, N features, H query heads, G key/value heads, D head size, K experts per token.
Arithmetic is in float32 at least (float64 stays), rounded to the dtype of the input at the end;
`rms_norm` also rounds before its weight, as the models were trained. T may be 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rackmount_registry.attention import mapped, narrow
from rackmount_registry.experts import RouterState, Routing
from rackmount_registry.sampling import sample as sample
from rackmount_registry.sampling.order import largest


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


def rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
    cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_map: Tensor | None = None,
    k_map: Tensor | None = None,
) -> Tensor:
    """Head norms, where there are any, then rotary position embedding (arXiv 2104.09864) of q and
    k; k and v into the cache, and q [T, H, D] back.

    q [T, H, D], k and v [T, G, D], which may be views of one wider tensor; positions and slots
    integers [T]; table float32 [max positions, 2, R / 2]: cosines, then sines, for the first R of
    the D features, or None for no rotation. `q_norm`, `k_norm` [D], both or neither. Halves are
    rotated against each other, or even and odd features where `interleaved`. The cache has the
    layout "slots" (see `attention.CACHE_LAYOUTS`); a token whose slot is below 0 is padding, and
    writes nothing. An FP8 cache comes with `k_scale` and `v_scale`, float32 [G], and is written as
    `attention.narrow` says; others come with neither. `q_map` and `k_map` [D, D], both or neither,
    map q and k once they are turned, as `attention.mapped` says.
    """
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if table is not None:
        cos, sin = table[positions].unsqueeze(1).unbind(2)
        q, k = _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)
    if q_map is not None and k_map is not None:
        q, k = mapped(q, q_map), mapped(k, k_map)
    kept = slots >= 0
    k, v = k[kept], v[kept]
    if k_scale is not None and v_scale is not None:
        k, v = narrow(k, k_scale), narrow(v, v_scale)
    cache[:, slots[kept].long()] = torch.stack((k, v)).to(cache.dtype)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    turned, kept = _wide(x[..., :width]), x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((out.to(x.dtype), kept), -1)


def embedding(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows `ids - first` of weight [local vocabulary, N]; zeros for ids of other ranks. Integer ids
    [T] -> [T, N]."""
    if not len(weight):
        return weight.new_zeros(len(ids), weight.shape[1])
    local = ids - first
    mine = (local >= 0) & (local < len(weight))
    return weight[local.where(mine, 0)].where(mine.unsqueeze(-1), 0)


def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Router logits [T, experts] -> ids int32 [T, K] by falling choice score, lowest id first at
    ties; weights float32 [T, K].

    The choice score is the score plus `bias` float32 [experts], or the logit itself where softmax
    alone would decide: it keeps the order, and is free of rounding. Experts outside the best groups
    count -inf; groups tie like experts. Weights are the scores without bias. A NaN counts as the
    largest number: such experts are chosen first, and what is divided by them is NaN.
    """
    logits = _wide(logits)
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    by_logit = routing.scoring == "softmax" and routing.group_score == "max" and bias is None
    choice = logits if by_logit else scores if bias is None else scores + bias
    if routing.num_groups > 1:
        size = choice.shape[-1] // routing.num_groups
        grouped = choice.view(len(choice), routing.num_groups, size)
        best = grouped.topk(2 if routing.group_score == "top2_sum" else 1, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, _first(best, routing.top_groups), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = _first(choice, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * routing.scaling


def _first(scores: Tensor, count: int) -> Tensor:
    """Indexes [T, count] of the largest, lowest index first at ties, which `topk` leaves open."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def gate(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None,
    slots: Tensor,
    state: RouterState,
) -> tuple[Tensor, Tensor]:
    """The router: `route` of the logits x [T, N] times weight [experts, N], transposed.

    Logits are rounded to the dtype of x, unless `routing.float32_logits`. A token whose slot,
    integers [T], is below 0 is padding: its ids are -1, its weights of any value, and it is not
    counted. `state.load` grows by the number of tokens that chose each expert.
    """
    if routing.float32_logits:
        x, weight = _wide(x), _wide(weight)
    ids, weights = route(torch.nn.functional.linear(x, weight), routing, bias)
    ids = ids.masked_fill(slots.unsqueeze(-1) < 0, -1)
    chosen = ids.flatten().long()
    state.load.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).to(state.load.dtype))
    return ids, weights


NORM_GATE_TOKENS = 8
"""Most that `norm_gate` is called for. A kernel has the programs that share a token's logits make
its norm again each, which pays while tokens are few."""


def norm_gate(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None,
    slots: Tensor,
    state: RouterState,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, *gate(y, ...)) of y = rms_norm(x, norm_weight, eps), x [T, N], for up to
    NORM_GATE_TOKENS tokens."""
    normed = rms_norm(x, norm_weight, eps)
    return normed, *gate(normed, weight, routing, bias, slots, state)


def build_batch(
    ids: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    last_ids: Tensor,
    block_tables: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    """The device's side of the batch, in place.

    ids int32 [T]: one below 0 stands for the token that was sampled last in row -1 - id, and is
    replaced by it; `last_ids` int32 [N] has it for every row of the engine. block_table int32
    [R, B] gets, of block_tables int32 [N, B], the rows `rows` int32 [R], as far as seq_lens int32
    [R] reach; what stands behind may stay.
    """
    sampled = last_ids[(-1 - ids).clamp_(min=0)]
    ids.copy_(torch.where(ids < 0, sampled, ids))
    num_blocks = -(-int(seq_lens.max()) // block_size) if len(rows) else 0
    block_table[:, :num_blocks] = block_tables[rows, :num_blocks]


IN_PROMPT = -(2**31)
"""The sign bit of a count: the token is in the prompt. The others count it in the output."""


def penalize(logits: Tensor, rows: Tensor, factors: Tensor, counts: Tensor) -> None:
    """Penalties on logits [R, V], float32 at least, in place.

    Integers rows [R] of N. Of each row, factors float64 [N, 3], rounded to the logits' dtype:
    repetition, frequency, presence; and counts int32 [N, V] (see `IN_PROMPT`). Tokens that are
    there are repeated: divided by the first where above 0, else multiplied. Then frequency times
    the count in the output, plus presence where that is not 0, is subtracted. All other tokens, and
    the rows whose factors are 1, 0, 0, keep their numbers.
    """
    repetition, frequency, presence = factors[rows].to(logits.dtype).T.unsqueeze(-1)
    counts = counts[rows]
    num_output = counts & ~IN_PROMPT
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized -= frequency * num_output + presence * (num_output > 0)
    torch.where(counts != 0, penalized, logits, out=logits)


def logprobs(logits: Tensor, token_ids: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of token_ids int64 [L] under logits [L, V], each with the `num` most likely, at most V:
    ids int64 [L, 1 + num], log-probabilities float32 [L, 1 + num], and int64 [L] the ranks of
    token_ids: 1 + the number of tokens more likely.

    More likely is what has the larger logit, as float32, also where the log-probabilities round to
    the same; equals come by lowest id. A row with a NaN or +inf, or of -inf alone, has NaN for all
    log-probabilities; there a NaN comes before all numbers, and is not more likely than any.
    """
    wide = _wide(logits)
    values, ids = wide.float(), token_ids.unsqueeze(-1)
    if num:
        ids = torch.cat((ids, largest(values, num)), -1)
    ranks = (values > values.gather(-1, ids[:, :1])).sum(-1) + 1
    return ids, wide.log_softmax(-1).gather(-1, ids).float(), ranks


SOCKET_OPS = (
    *("rms_norm", "add_rms_norm", "silu_mul", "rotary_write", "embedding"),
    *("gate", "norm_gate"),
)
"""Operations that sockets call."""
STEP_OPS = ("build_batch", "penalize", "sample", "logprobs")
"""Operations of the step around the model."""
OPS = SOCKET_OPS + STEP_OPS
"""Names that an op set may offer."""


class Ops:
    """The resolved operations of one engine: one callable per name in `OPS`, each from the op set
    chosen for it, with the signature of this module's function."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_mul = staticmethod(silu_mul)
    rotary_write = staticmethod(rotary_write)
    embedding = staticmethod(embedding)
    gate = staticmethod(gate)
    norm_gate = staticmethod(norm_gate)
    build_batch = staticmethod(build_batch)
    penalize = staticmethod(penalize)
    sample = staticmethod(sample)
    logprobs = staticmethod(logprobs)


def prepare(operation: Callable[..., Any], *arguments: Any) -> None:
    """Tells an operation how it will be called, by arguments like those of its calls: of one token
    or row where there will be any number, and with tensors whose values mean nothing.

    For operations that compile: one may have a method `prepare`, which takes these arguments and
    begins to, best in threads (see `device.ahead`), and which returns at once.
    """
    if (begin := getattr(operation, "prepare", None)) is not None:
        begin(*arguments)


def reference_ops() -> Ops:
    """This module's own functions, for the reference step and as the oracle of tests."""
    return Ops()
