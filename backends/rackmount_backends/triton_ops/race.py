"""Device functions of `sampling.choose_kernel`: the order of a row's tokens, and their race.

A row's vocabulary is in parts of `PART` ids. `tops` [WIDTH] holds the largest logit of each part,
and `parts` points at a list of those that matter, `count` of them in order, which the functions
load `PARTS` at a time. In the order, a larger logit comes first, of equals the lower id; the tokens
before (`value`, `token`) are those which come before that place in it. `scaled`, masses and scores
are those of `rackmount_registry.sampling.draw`.
"""

import triton
import triton.language as tl

from rackmount_backends.triton_ops.random import exp, log_noise
from rackmount_registry.sampling.draw import MASS_UNIT

UNIT = tl.constexpr(MASS_UNIT)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SLACK = tl.constexpr(1e-3)
"""Above the rounding of a bound: up to 64 in size, computed in float32 by approximate log2."""
INF = tl.constexpr(float("inf"))


@triton.jit
def order(x):
    """float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered(key):
    """The float32 whose `order` is `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def narrow(place, LOW: tl.constexpr):
    """The float32 whose `order` is `place` without its `LOW` lowest bits, and whose own are 0."""
    return ordered((place << LOW) | tl.where(place < 0, (1 << LOW) - 1, 0))


@triton.jit
def middle(low, high):
    """The mean rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def list_parts(parts, tops, least, NUM_PARTS: tl.constexpr):
    """Lists the parts whose largest is at least `least`, in order; gives their number."""
    columns = tl.arange(0, tops.shape[0])
    listed = (tops >= least) & (columns < NUM_PARTS)
    places = tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all have read the list before
    tl.store(parts + places, columns, mask=listed)
    tl.debug_barrier()
    return tl.sum(listed.to(tl.int32), 0)


@triton.jit
def load_parts(
    logits, parts, first, count, V: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):
    """Ids, in order, and logits of the listed parts from place `first` on; V and -inf elsewhere."""
    places = first + tl.arange(0, PARTS)
    part = tl.load(parts + places, mask=places < count, other=0)
    ids = part[:, None] * PART + tl.arange(0, PART)[None, :]
    there = (places < count)[:, None] & (ids < V)
    values = tl.load(logits + ids, mask=there, other=-INF).to(tl.float32)
    return tl.where(there, ids, V), values


@triton.jit
def scaled(values, top, temperature):
    """See `draw._scaled`."""
    return tl.div_rn(values - top, temperature)


@triton.jit
def measure(
    logits,
    parts,
    count,
    value,
    token,
    top,
    temperature,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """Number and mass of the tokens before (`value`, `token`), all of which are in listed parts."""
    numbers = tl.zeros([PARTS], tl.int32)
    masses = tl.zeros([PARTS], tl.int64)
    for first in range(0, count, PARTS):
        ids, values = load_parts(logits, parts, first, count, V, PART, PARTS)
        before = (values > value) | ((values == value) & (ids < token))
        mass = exp(scaled(values, top, temperature), LIBDEVICE) * UNIT
        numbers += tl.sum(before.to(tl.int32), 1)
        masses += tl.sum(tl.where(before, mass.to(tl.int64), 0), 1)
    return tl.sum(numbers, 0), tl.sum(masses, 0)


@triton.jit
def challenge(scores, values, ids, score, value, token):
    """The better of (`score`, `value`, `token`) and the best of a tile: by score, by value, and by
    lowest id."""
    most = tl.max(scores)
    if (most >= score) & (most > -INF):
        level = scores == most
        highest = tl.max(tl.where(level, values, -INF))
        lowest = tl.min(tl.where(level & (values == highest), ids, 0x7FFFFFFF))
        better = (most > score) | (highest > value) | ((highest == value) & (lowest < token))
        score = most
        value = tl.where(better, highest, value)
        token = tl.where(better, lowest, token)
    return score, value, token


@triton.jit
def race_all(
    logits,
    tops,
    bounds,
    top,
    temperature,
    min_x,
    key,
    by_value,
    V: tl.constexpr,
    PART: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """The winner among all tokens from `min_x` on: its logit and id. Equal scores: the larger logit
    where `by_value`, the lower id."""
    columns = tl.arange(0, tops.shape[0])
    bounds = (tops - top) * (LOG2_E / temperature) + bounds
    score, value, token = -INF, -INF, V
    highest = tl.max(bounds)
    while (highest > -INF) & (highest * LN_2 + SLACK >= score):
        part = tl.min(tl.where(bounds == highest, columns, tops.shape[0]))
        ids = part * PART + tl.arange(0, PART)
        values = tl.load(logits + ids, mask=ids < V, other=-INF).to(tl.float32)
        x = scaled(values, top, temperature)
        scores = tl.where(x >= min_x, x - log_noise(key, ids, LIBDEVICE), -INF)
        ties = tl.where(by_value, values, 0.0)
        score, value, token = challenge(scores, ties, ids, score, value, token)
        bounds = tl.where(columns == part, -INF, bounds)
        highest = tl.max(bounds)
    return value, token


@triton.jit
def race_before(
    logits,
    parts,
    count,
    value,
    token,
    top,
    temperature,
    min_x,
    key,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """The winner among the tokens of listed parts before (`value`, `token`) and from `min_x` on."""
    best, best_value, best_token = -INF, -INF, V
    for first in range(0, count, PARTS):
        ids, values = load_parts(logits, parts, first, count, V, PART, PARTS)
        x = scaled(values, top, temperature)
        before = (values > value) | ((values == value) & (ids < token))
        scores = tl.where(before & (x >= min_x), x - log_noise(key, ids, LIBDEVICE), -INF)
        best, best_value, best_token = challenge(
            scores, values, ids, best, best_value, best_token
        )  # fmt: skip
    return best_value, best_token


@triton.jit
def pivot_of(tops, k):
    """At least k of the parts' largest, so at least k logits, are not below it; -inf where there
    are not k parts. It is not above the k-th largest, and within the 16 lowest bits of it."""
    places = order(tops) >> 16
    lowest = order(tl.full([], -INF, tl.float32))
    low, high = lowest >> 16, tl.max(places)
    while low < high:
        mid = middle(low, high)
        enough = tl.sum((places >= mid).to(tl.int32), 0) >= k
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return ordered(tl.maximum(low << 16, lowest))


@triton.jit
def end_of(
    logits,
    parts,
    count,
    k,
    least,
    top,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
):
    """What the k most likely tokens come before: the k-th largest logit, which is not below
    `least`, and the id after the last that is kept of those equal to it."""
    low, high = order(least) >> LOW, order(top) >> LOW
    while low < high:
        mid = middle(low, high)
        number, _ = measure(
            logits, parts, count, narrow(mid, LOW), V, top, 1.0, V, PART, PARTS, False
        )  # fmt: skip
        enough = number >= k
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    value = narrow(low, LOW)
    larger, _ = measure(logits, parts, count, value, 0, top, 1.0, V, PART, PARTS, False)
    wanted = k - larger
    token = V
    for first in range(0, count, PARTS):
        ids, values = load_parts(logits, parts, first, count, V, PART, PARTS)
        ids, values = tl.ravel(ids), tl.ravel(values)
        equal = (values == value) & (ids < V)
        last = equal & (tl.cumsum(equal.to(tl.int32), 0) == wanted)
        token = tl.minimum(token, tl.min(tl.where(last, ids + 1, V)))
        wanted -= tl.sum(equal.to(tl.int32), 0)
    return value, token
