"""The random numbers of `rackmount_registry.sampling.random`, for kernels."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def splitmix64(z):
    """uint64, elementwise."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key(seed, position):
    """uint64 of an int64 seed, its bits, and an integer position."""
    return splitmix64(splitmix64(seed.to(tl.uint64)) + position.to(tl.int64).to(tl.uint64))


@triton.jit
def mix(x):
    """uint32, elementwise."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(key, ids):
    """`v`, but up to 1: float32 of a key and vocabulary indices."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    h = mix(mix(ids.to(tl.uint32)) * (high | 1) + low)
    return h.to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
def log2_bound(key, ids, LIBDEVICE: tl.constexpr):
    """What log2(e) is not below, within 1e-5: log2(v), approximated in one instruction."""
    v = uniform(key, ids)
    return libdevice.fast_log2f(v) if LIBDEVICE else tl.log2(v)


@triton.jit
def log_noise(key, ids, LIBDEVICE: tl.constexpr):
    """log(e), by the functions that torch calls on a GPU; the interpreter has none of them."""
    v = tl.minimum(uniform(key, ids), 1 - 2.0**-24)
    if LIBDEVICE:
        return libdevice.log(-libdevice.log1p(-v))
    # 1 - v is exact in float64, and its logarithm as precise.
    return tl.log((-tl.log(1 - v.to(tl.float64))).to(tl.float32))


@triton.jit
def exp(x, LIBDEVICE: tl.constexpr):
    """exp(x) as torch computes it; Triton's own is an approximation."""
    return libdevice.exp(x) if LIBDEVICE else tl.exp(x)
