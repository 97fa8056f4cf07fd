"""Quantized weights become operands of mma.sync in registers, without a `join`.

Words are as in `rackmount_registry.device.unpack`. Of their halves, int16 [R, C] (or in more axes,
without `along` and zeros), which are read alike, plane i has in column c the value at place
`plane_columns`(c, i), and there is a product for each plane. `dtype` is bfloat16 or float16, and
values are exact in it. COMPILED: not in the interpreter, which knows no assembly.
"""

import triton
import triton.language as tl

DIGITS: tl.constexpr = tl.constexpr(tuple(map(str, range(16))))


@triton.jit
def plane_columns(c, i, NUM: tl.constexpr):
    """Places, among a row's values, of what is in columns c of plane i of NUM: runs of eight."""
    return c // 8 * (8 * NUM) + 8 * i + c % 8


@triton.jit
def int4_planes(
    halves, zeros, along, dtype: tl.constexpr, OFFSET: tl.constexpr, COMPILED: tl.constexpr
):
    """As `unpack_int4`: halves int16 [R, C] -> four planes [R, C]. With OFFSET each value is larger
    by `int4_offset`, whose products are to be taken off the sums: half of the work is saved, and
    sums cancel to five bits or so. `along`: zeros, int32 [R], that are to be loaded with them, or
    None."""
    # A nibble in the highest bits of the mantissa of 16 is that number plus n.
    bf16: tl.constexpr = dtype == tl.bfloat16
    UP: tl.constexpr = 3 if bf16 else 6
    MASK: tl.constexpr = 0x0078 if bf16 else 0x03C0
    bits = tl.cast(0x4180 if bf16 else 0x4C00, tl.int16)
    if along is not None:
        bits |= along.to(tl.int16)[:, None]
    planes = (
        _pick(halves, -UP, MASK, bits, dtype, COMPILED),
        _pick(halves, 4 - UP, MASK, bits, dtype, COMPILED),
        _pick(halves, 8 - UP, MASK, bits, dtype, COMPILED),
        _pick(halves, 12 - UP, MASK, bits, dtype, COMPILED),
    )
    if not OFFSET:
        minus = -int4_offset(zeros)
        if zeros is not None:
            minus = minus[:, None]
        planes = (
            _fma_halves(planes[0], 1.0, minus, COMPILED),
            _fma_halves(planes[1], 1.0, minus, COMPILED),
            _fma_halves(planes[2], 1.0, minus, COMPILED),
            _fma_halves(planes[3], 1.0, minus, COMPILED),
        )
    return planes


@triton.jit
def int4_offset(zeros):
    """16 plus the zeros, float32 [R], or None for 8."""
    if zeros is None:
        offset = 24.0
    else:
        offset = 16.0 + zeros
    return offset


@triton.jit
def int8_planes(halves, zeros, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """As `unpack_int8`: halves int16 [R, C] -> two planes [R, C]."""
    MAGIC: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    even = _pick(halves, 0, 0x007F, MAGIC, dtype, COMPILED)
    even = _fma_halves(_pick(halves, 0, 0x0080, MAGIC, dtype, COMPILED), -1.0, even, COMPILED)
    odd = _pick(halves, 8, 0x007F, MAGIC, dtype, COMPILED)
    odd = _fma_halves(_pick(halves, 8, 0x0080, MAGIC, dtype, COMPILED), -1.0, odd, COMPILED)
    if zeros is not None:
        even = _fma_halves(even, 1.0, -zeros[:, None], COMPILED)
        odd = _fma_halves(odd, 1.0, -zeros[:, None], COMPILED)
    return even, odd


@triton.jit
def fp8_planes(halves, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """As `unpack_fp8`: halves int16 [R, C] -> two planes [R, C]."""
    bf16: tl.constexpr = dtype == tl.bfloat16
    MASK: tl.constexpr = 0x07F0 if bf16 else 0x3F80
    POWER: tl.constexpr = 2.0**120 if bf16 else 2.0**8
    even = _pick(
        halves,
        -8,
        -0x8000,
        _pick(halves, -4 if bf16 else -7, MASK, 0, tl.int16, COMPILED),
        dtype,
        COMPILED,
    )
    odd = _pick(
        halves,
        0,
        -0x8000,
        _pick(halves, 4 if bf16 else 1, MASK, 0, tl.int16, COMPILED),
        dtype,
        COMPILED,
    )
    return _fma_halves(even, POWER, -0.0, COMPILED), _fma_halves(odd, POWER, -0.0, COMPILED)


@triton.jit
def _pick(halves, SHIFT: tl.constexpr, mask, bits, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """((halves >> SHIFT) & mask) | bits, seen as `dtype`; SHIFT may be negative."""
    if COMPILED:
        TYPE: tl.constexpr = "shr.b32" if SHIFT >= 0 else "shl.b32"
        AMOUNT: tl.constexpr = DIGITS[SHIFT] if SHIFT >= 0 else DIGITS[-SHIFT]
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 a; " + TYPE + " a, $1, " + AMOUNT + "; lop3.b32 $0, a, $2, $3, 0xEA; }",
            "=r,r,r,r",
            [halves, tl.cast(mask, tl.int16), tl.cast(bits, tl.int16)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        shifted = halves >> SHIFT if SHIFT >= 0 else halves << -SHIFT
        out = (shifted & tl.cast(mask, tl.int16)) | tl.cast(bits, tl.int16)
    return out.to(dtype, bitcast=True)


@triton.jit
def _fma_halves(x, y, z, COMPILED: tl.constexpr):
    """x * y + z in the dtype of x."""
    if COMPILED:
        TYPE: tl.constexpr = "bf16x2" if x.dtype == tl.bfloat16 else "f16x2"
        out = tl.inline_asm_elementwise(
            "fma.rn." + TYPE + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [x, tl.cast(y, x.dtype), tl.cast(z, x.dtype)],
            dtype=x.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        out = (x.to(tl.float32) * y + z).to(x.dtype)
    return out
