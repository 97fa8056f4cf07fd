"""What decoding and prefill do alike with a tile of keys and values (arXiv 2205.14135).

Weights are powers of two: `top` is the greatest score times log2(e) that a row has met, and its
weights are relative to it. A hidden key has a score so low, but finite, that the
first seen one wipes out what it left: its values must be finite, so keys past the end are never
loaded (the last one is, again).

Of an FP8 cache, keys and values are widened to float16: it holds them exactly, in one instruction
for two, where bfloat16 takes two more for each. Their scales meet scores and outputs alone.
"""

import triton
import triton.language as tl

from rackmount_registry.device.prefetch import prefetch

LOG2E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1.0e30)
WIDEN_PAIRS = tl.constexpr("""{
    .reg .b16 even, odd;
    .reg .b32 both;
    prmt.b32 both, $2, 0, 0x3120;
    mov.b32 {even, odd}, both;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
"""Two pairs at a time. Left to the compiler, values would be read byte by byte: a product takes
them across the rows in which they lie."""


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
def call_slots(
    base, blocks, places, slot_stride, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr
):  # fmt: skip
    """Calls what `load_slots` would read into L2."""
    STEP: tl.constexpr = 128 // (base.dtype.element_ty.primitive_bitwidth // 8)  # of a line
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_SIZE + STEP - 1) // STEP)
    columns = tl.minimum(tl.arange(0, LINES) * STEP, HEAD_SIZE - 1)
    slots = blocks.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE
    prefetch(base + (slots * slot_stride)[:, None] + columns[None, :])


@triton.jit
def fit_queries(q):
    """q [M, D] as float16, for an FP8 cache: divided by a power of two that brings its largest
    number to between 1 and 2, since float16 ends at 65504; and that power. Smaller ones than a
    millionth stay small, so that the power still leaves a hidden score as low as it must be."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), 1), 0)
    exponent = tl.floor(tl.log2(tl.maximum(largest, 1.0e-6)))
    return (wide * tl.exp2(-exponent)).to(tl.float16), tl.exp2(exponent)


@triton.jit
def widen_pairs(pairs):
    """Pairs of float8_e4m3fn in int16 [N, D / 2], the even columns low -> two of float16."""
    return tl.inline_asm_elementwise(
        WIDEN_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def weigh(
    top, q, keys, seen, scale, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr
):  # fmt: skip
    """top [M] with keys [N, D] met by q [M, D]; what earlier weights shrank by [M], and the weights
    of these [M, N]. `seen` [M, N] counts where `MASKED`."""
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="tf32x3")
    factor = scale * LOG2E
    if SOFT_CAP is not None:  # tanh(x) = 2 sigmoid(2 x) - 1
        capped = 2.0 * tl.sigmoid(scores * (2.0 * scale / SOFT_CAP)) - 1.0
        scores = capped * (SOFT_CAP / scale)
    if MASKED:
        scores = tl.where(seen, scores, HIDDEN)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])
    return new_top, tl.exp2(top - new_top), weights


@triton.jit
def add_values(out, shrink, weights, values):
    """out [M, D] with values [N, D], by weights [M, N]. Values are of the queries' dtype."""
    return tl.dot(weights.to(values.dtype), values, out * shrink[:, None], input_precision="tf32x3")
