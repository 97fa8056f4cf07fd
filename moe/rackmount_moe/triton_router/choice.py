"""Device functions that choose experts: from logits of some tokens to their ids and weights.

The experts of a token lie along a power of two of columns, each group padded to one: `experts` [C]
has the expert of each column, or E and more where there is none. Numbers are compared as integers
in the same order, which a warp reduces in one instruction.
"""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-0x80000000)
"""Below the key of any number."""
NAN_KEY = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(float("inf"))


@triton.jit
def key_of(x):
    """float32 -> int32 in the same order; -0 is 0, and NaN the largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def number_of(key):
    """The float32 whose key it is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def columns_of_experts(
    E: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr
):
    """The expert of each of C columns, of which every group has W; E or more where there is none.

    Where the compiler sees that columns are consecutive, several tokens get rows that stay within a
    warp, and wide loads; one token, in one warp anyway, is spared a change of layout before its
    results are stored.
    """
    column = tl.arange(0, C)
    if BLOCK_T > 1 and (GROUPS == 1 or E == C):
        return column
    group, place = column // W, column % W
    there = (group < GROUPS) & (place < E // GROUPS)
    return tl.where(there, group * (E // GROUPS) + place, E)


@triton.jit
def _within_top_groups(
    keys,
    T: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """Keys [T, C], those outside the best groups as of -inf."""
    G: tl.constexpr = C // W
    grouped = keys.reshape(T, G, W)
    group = tl.arange(0, G)
    best = tl.max(grouped, 2)
    if TOP2:
        place = tl.arange(0, W)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], place, W), 2)
        second = tl.max(tl.where(place == first[:, :, None], NO_KEY, grouped), 2)
        best = key_of(number_of(best) + number_of(second))
    best = tl.where(group[None, :] < GROUPS, best, NO_KEY)
    mine, other = best[:, :, None], best[:, None, :]
    before = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    kept = tl.sum(before.to(tl.int32), 2) < TOP_GROUPS
    least = key_of(tl.full([T, G, W], -INF, tl.float32))
    return tl.where(kept[:, :, None], grouped, least).reshape(T, C)


@triton.jit
def choose(
    logits,
    experts,
    tokens,
    num_tokens,
    bias,
    slots,
    load,
    ids,
    weights,
    BLOCK_T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
):
    """`ops.route` of float32 logits [BLOCK_T, C] of `tokens`, and the rest of `ops.gate`."""
    inside = tokens < num_tokens
    slot = tl.load(slots + tokens, mask=inside, other=-1)  # early: it is needed at the end
    there = (experts < E)[None, :]
    logits = tl.where(there, logits, -INF)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    if bias is not None:
        added = tl.load(bias + experts, mask=experts < E, other=0.0)
        keys = key_of(scores + added[None, :])
    elif SIGMOID or TOP2:
        keys = key_of(scores)
    else:
        keys = key_of(logits)
    keys = tl.where(there, keys, NO_KEY)
    if GROUPS > 1:
        keys = _within_top_groups(keys, BLOCK_T, GROUPS, TOP_GROUPS, TOP2, C, W)
        keys = tl.where(there, keys, NO_KEY)
    place = tl.full([BLOCK_T, C], K, tl.int32)
    for nth in range(K):
        best = tl.max(keys, 1)
        first = tl.min(tl.where(keys == best[:, None], experts[None, :], E), 1)
        taken = experts[None, :] == first[:, None]
        place = tl.where(taken, nth, place)
        keys = tl.where(taken, NO_KEY, keys)
    chosen = place < K
    if RENORMALIZE:
        total = tl.sum(tl.where(chosen, scores, 0.0), 1)
        scores = scores / (total + 1e-20)[:, None]
    counts = chosen & (slot >= 0)[:, None]
    at = tokens[:, None].to(tl.int64) * K + place
    tl.store(ids + at, tl.where(counts, experts[None, :], -1), mask=chosen & inside[:, None])
    tl.store(weights + at, scores * SCALING, mask=chosen & inside[:, None])
    ones = tl.full([BLOCK_T, C], 1, tl.int64)
    tl.atomic_add(load + experts[None, :] + tl.zeros_like(place), ones, counts, sem="relaxed")
