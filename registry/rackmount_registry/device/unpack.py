"""Quantized weights become 16-bit operands of the MMA in registers, by bit operations.

A thread's part of the MMA's first operand (PTX ISA, fragments of m16n8k16 and of wgmma) is, in each
16 columns, pairs of neighbours: columns 2t, 2t + 1 and 2t + 8, 2t + 9 for thread t of 4. So words
are stored such that the thread which reads one needs just its values: 16 bytes, the words t = 0 to
3, hold columns 8i + 2t + h, for h = 0 and 1, in

- nibble 4h + i of word t, for i = 0 to 3: 32 columns of four bits,
- byte 2h + i of word t, for i = 0 and 1: 16 columns of eight bits.

Of four bits in panels, the columns are dealt out to several such runs first: see `RUNS`.

A shift and a mask then take a pair out of a word, one value in each half. Triton follows layouts
backward through `join`, `permute` and `reshape`; packed words alone move between threads.

That holds for wgmma. Where there is a `join`, Triton gives mma.sync another fragment.

`dtype` is bfloat16 or float16, and values are exact in it. COMPILED: not in the interpreter, which
knows no assembly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIGNS: tl.constexpr = tl.constexpr(-0x7FFF8000)
"""The sign bits of both halves of a word."""
ONE_BF16: tl.constexpr = tl.constexpr(0x3F803F80)
ONE_FP16: tl.constexpr = tl.constexpr(0x3C003C00)


def interleave(values: Tensor, bits: int) -> Tensor:
    """Values [..., in] of 4 or 8 bits in the order in which words hold them, by rising bits;
    `in` is a multiple of the columns in 16 bytes, 128 / bits."""
    return values.unflatten(-1, (-1, 16 // bits, 4, 2)).movedim(-3, -1).flatten(-4)


def deinterleave(values: Tensor, bits: int) -> Tensor:
    """The inverse of `interleave`."""
    return values.unflatten(-1, (-1, 4, 2, 16 // bits)).movedim(-1, -3).flatten(-4)


def pack_nibbles(values: Tensor) -> Tensor:
    """Values 0 to 15, uint8 [..., in] -> int32 [..., in / 8], by rising bits."""
    return (values[..., ::2] | values[..., 1::2] << 4).contiguous().view(torch.int32)


@triton.jit
def unpack_int4(words, zeros, dtype: tl.constexpr, COMPILED: tl.constexpr, RUNS: tl.constexpr = 1):
    """words int32 [R, W] of nibbles n, zeros float32 [R] or None for 8 -> n - zero, [R, 8 W].

    RUNS: of so many runs of 16 bytes the columns are dealt out by eights: the first run's come
    first in each."""
    # A nibble in the lowest bits of the mantissa of 128 (bfloat16) or 1024 is that number plus n.
    MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    UNIT: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    one: tl.constexpr = ONE_BF16 if dtype == tl.bfloat16 else ONE_FP16
    if zeros is None:
        minus: tl.constexpr = SIGNS + (MAGIC | 0x00080008)
    else:
        minus = _twice(-UNIT - zeros, dtype)[:, None]
    pairs = tl.join(
        tl.join(
            _fma(and_xor(words, 0x000F000F, MAGIC, COMPILED), one, minus, dtype, COMPILED),
            _fma(and_xor(words >> 8, 0x000F000F, MAGIC, COMPILED), one, minus, dtype, COMPILED),
        ),
        tl.join(
            _fma(and_xor(words >> 4, 0x000F000F, MAGIC, COMPILED), one, minus, dtype, COMPILED),
            _fma(and_xor(words >> 12, 0x000F000F, MAGIC, COMPILED), one, minus, dtype, COMPILED),
        ),
    )
    return _in_order(pairs.reshape(words.shape[0], words.shape[1], 4), dtype, RUNS)


@triton.jit
def unpack_int8(words, zeros, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """words int32 [R, W] of signed bytes n, zeros float32 [R] or None for 0 -> n - zero,
    [R, 4 W]."""
    # 128 (or 1024) plus the lower seven bits, minus 128 (or 1024) plus 128 where the sign is set.
    MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    one: tl.constexpr = ONE_BF16 if dtype == tl.bfloat16 else ONE_FP16
    minus_one: tl.constexpr = SIGNS + one
    even = _fma(
        and_xor(words, 0x00800080, MAGIC, COMPILED),
        minus_one,
        and_xor(words, 0x007F007F, MAGIC, COMPILED),
        dtype,
        COMPILED,
    )
    odd = _fma(
        and_xor(words >> 8, 0x00800080, MAGIC, COMPILED),
        minus_one,
        and_xor(words >> 8, 0x007F007F, MAGIC, COMPILED),
        dtype,
        COMPILED,
    )
    if zeros is not None:
        minus = _twice(-zeros, dtype)[:, None]
        even = _fma(even, one, minus, dtype, COMPILED)
        odd = _fma(odd, one, minus, dtype, COMPILED)
    return _in_order(tl.join(even, odd), dtype, 1)


@triton.jit
def unpack_fp8(words, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """words int32 [R, W] of e4m3 bytes -> [R, 4 W]. A byte that is not a number comes as 480."""
    # Exponent and mantissa move to where they stand in `dtype`; the exponents' offsets differ.
    bf16: tl.constexpr = dtype == tl.bfloat16
    MASK: tl.constexpr = 0x07F007F0 if bf16 else 0x3F803F80
    POWER: tl.constexpr = 0x7B807B80 if bf16 else 0x5C005C00  # 2^120, 2^8
    odd = and_xor(words, SIGNS, (words >> (4 if bf16 else 1)) & MASK, COMPILED)
    even = and_xor(words << 8, SIGNS, (words << (4 if bf16 else 7)) & MASK, COMPILED)
    # Minus zero is what may be added to a zero of either sign.
    pairs = tl.join(
        _fma(even, POWER, SIGNS, dtype, COMPILED), _fma(odd, POWER, SIGNS, dtype, COMPILED)
    )
    return _in_order(pairs, dtype, 1)


@triton.jit
def _in_order(pairs, dtype: tl.constexpr, RUNS: tl.constexpr):
    """pairs int32 [R, W, I] -> the values of both halves [R, 2 W I], by their columns."""
    R: tl.constexpr = pairs.shape[0]
    W: tl.constexpr = pairs.shape[1]
    I: tl.constexpr = pairs.shape[2]  # noqa: E741
    ordered = pairs.reshape(R, W // (4 * RUNS), RUNS, 4, I).permute(0, 1, 4, 2, 3)
    ordered = ordered.reshape(R, W * I)
    return tl.join(_low(ordered, dtype), _low(ordered >> 16, dtype)).reshape(R, 2 * W * I)


@triton.jit
def _low(words, dtype: tl.constexpr):
    """The lower half of each word."""
    return words.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _twice(number, dtype: tl.constexpr):
    """float32 -> words with the number in both halves."""
    bits = number.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def and_xor(words, mask, bits, COMPILED: tl.constexpr):
    """(words & mask) ^ bits, one instruction: the compiler makes two of it where both are
    constants."""
    if COMPILED:
        words = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;",
            "=r,r,r,r",
            [words, mask, bits],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = (words & mask) ^ bits
    return words


@triton.jit
def _fma(x, y, z, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """x * y + z in both halves of words."""
    if COMPILED:
        TYPE: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        out = tl.inline_asm_elementwise(
            "fma.rn." + TYPE + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [x, y, z],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        x, y, z = tl.cast(x, tl.int32), tl.cast(y, tl.int32), tl.cast(z, tl.int32)
        low = _low(x, dtype).to(tl.float32) * _low(y, dtype).to(tl.float32)
        high = _low(x >> 16, dtype).to(tl.float32) * _low(y >> 16, dtype).to(tl.float32)
        low += _low(z, dtype).to(tl.float32)
        high += _low(z >> 16, dtype).to(tl.float32)
        out = (_twice(low, dtype) & 0xFFFF) | (_twice(high, dtype) << 16)
    return out


@triton.jit
def complete(sums, COMPILED: tl.constexpr):
    """The sums of an MMA that took such values, of which the compiler must not think that only the
    next MMA needs them: so it waits for them.

    wgmma reads values from registers while the program goes on. The compiler would let eight MMAs
    be under way, and wait for one before the next block's values take its place; but those are all
    made before the first of them is multiplied, over what is still read.
    """
    if COMPILED:
        sums = tl.inline_asm_elementwise(
            "// $0 is complete", "=r,0", [sums], dtype=sums.dtype, is_pure=True, pack=1
        )
    return sums
