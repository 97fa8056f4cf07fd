"""What decoding and prefill do alike with a tile of keys and values (arXiv 2205.14135).

Weights are powers of two: `top` is the greatest score times log2(e) that a row has met, and its
weights are relative to it. A hidden key has a score so low, but finite, that the
first seen one wipes out what it left: its values must be finite, so keys past the end are never
loaded (the last one is, again).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1.0e30)


@triton.jit
def block_ids(table, places, BLOCK_SIZE: tl.constexpr):
    """Of the tokens at `places` [N] of a sequence whose block table starts at `table`."""
    return tl.load(table + places // BLOCK_SIZE)


@triton.jit
def load_slots(
    base, blocks, places, slot_stride, columns,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Rows [N, D] of keys or values at `places` [N] in `blocks` [N]; zeros past the head size."""
    slots = blocks.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE
    pointers = base + (slots * slot_stride)[:, None] + columns[None, :]
    if columns.shape[0] == HEAD_SIZE:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def add_keys(
    out, top, q, keys, values, seen,
    MASKED: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """out [M, D] and top [M] with keys and values [N, D] attended to by q [M, D]; what their
    weights shrank by [M], and the new weights [M, N].

    `seen` [M, N] counts where `MASKED`. Keys and values are of q's dtype here: those of a narrower
    cache are to be widened before.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
    factor: tl.constexpr = SCALE * LOG2E
    if SOFT_CAP is not None:  # tanh(x) = 2 sigmoid(2 x) - 1
        capped = 2.0 * tl.sigmoid(scores * (2.0 * SCALE / SOFT_CAP)) - 1.0
        scores = capped * (SOFT_CAP / SCALE)
    if MASKED:
        scores = tl.where(seen, scores, HIDDEN)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None], input_precision="tf32x3")
    return out, new_top, shrink, weights
