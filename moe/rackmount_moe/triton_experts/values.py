"""Quantized values as float32 numbers, for products on the ordinary cores.

Words hold them as `rackmount_registry.device.unpack` says.
"""

import triton
import triton.language as tl

from rackmount_registry.device.unpack import and_xor

NIBBLES: tl.constexpr = tl.constexpr(0x000F000F)
"""The lowest of both halves of a word."""
MAGIC: tl.constexpr = tl.constexpr(0x43004300)
"""128 in both halves of a word, in bfloat16: its lowest bits are worth 1."""
BELOW: tl.constexpr = tl.constexpr(0x4300 / 65536)
"""What the lower half of `MAGIC` adds to 128 in a float32 of the whole word."""


@triton.jit
def int4_values(words, x, COMPILED: tl.constexpr):
    """words int32 [R, W] of nibbles and float32 x [I, 8 W] -> what nibbles are taken as [R, 8 W],
    and what is to be multiplied by that in place of x. By how much the products' sums are too large
    is up to the caller.

    Two nibbles in the lowest bits of `MAGIC`, low and high, are the bfloat16 numbers 128 + low and
    128 + high. The word as a float32 is 128 + high + BELOW + low / 65536, which saves taking them
    apart: its last part goes where the low one's x is less by that part of the high one's.
    """
    low, high = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
    low -= high * (1.0 / 65536)
    given = tl.join(low, high)
    pairs = tl.join(
        tl.join(
            and_xor(words, NIBBLES, MAGIC, COMPILED), and_xor(words >> 8, NIBBLES, MAGIC, COMPILED)
        ),
        tl.join(
            and_xor(words >> 4, NIBBLES, MAGIC, COMPILED),
            and_xor(words >> 12, NIBBLES, MAGIC, COMPILED),
        ),
    )
    pairs = _in_order(pairs.reshape(words.shape[0], words.shape[1], 4))
    values = tl.join((pairs << 16).to(tl.float32, bitcast=True), pairs.to(tl.float32, bitcast=True))
    return values.reshape(words.shape[0], words.shape[1] * 8), given


@triton.jit
def fp8_values(words, CONVERTS: tl.constexpr):
    """words int32 [R, W] of e4m3 bytes -> float32 [R, 4 W]. The GPU's own conversion, from compute
    capability 8.9 on, takes half the instructions that bit operations do; here no operand of the
    tensor cores must come of it."""
    if CONVERTS:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 lows, highs;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 lows, low;
            cvt.rn.f16x2.e4m3x2 highs, high;
            mov.b32 {a, b}, lows;
            mov.b32 {c, d}, highs;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = _fp8(words << 24), _fp8(words << 16), _fp8(words << 8), _fp8(words)
    low, high = _in_order(tl.join(a, b)), _in_order(tl.join(c, d))
    return tl.join(low, high).reshape(words.shape[0], words.shape[1] * 4)


@triton.jit
def _fp8(words):
    """The highest byte of each word: exponents of float32 are larger by 120. The shift fills in the
    sign, of which the mask leaves one bit."""
    return ((words >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _in_order(parts):
    """parts [R, W, I] of each word -> [R, W I], by their columns."""
    R: tl.constexpr = parts.shape[0]
    W: tl.constexpr = parts.shape[1]
    I: tl.constexpr = parts.shape[2]  # noqa: E741
    return parts.reshape(R, W // 4, 4, I).permute(0, 1, 3, 2).reshape(R, W * I)
