"""Random numbers without state, the same wherever they are computed.

A function of (seed, position, vocabulary index), where `position` is the index that the sampled
token takes in its sequence. Integers are modulo 2**32 (u32) or 2**64 (u64); `>>` shifts zeros in.

    splitmix64(z):  z = z + 0x9E3779B97F4A7C15                           u64 (Steele et al. 2014)
                    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                    z ^ (z >> 31)
    mix(x):         x = (x ^ (x >> 16)) * 0x7FEB352D                     u32 (Wellons: lowbias32)
                    x = (x ^ (x >> 15)) * 0x846CA68B
                    x ^ (x >> 16)

    key(seed, position) = splitmix64(splitmix64(seed) + position)        u64
    h(key, index) = mix(mix(index) * (high32(key) | 1) + low32(key))     u32
    v = min(float32(h) * 2**-32 + 2**-33, 1 - 2**-24)                    float32, to nearest even
    e = -log1p(-v)                                                       float32, mean 1

The exponential race: over a distribution p, argmin(e / p), that is argmax(log p - log e), is a
sample of p. The smallest `e` decide it, and there `v` has all of its 32 bits; from 2**-33 to 16.7,
they let no token win that is less than 2**-38 times as likely as the most likely one. `v` is equal
bit for bit everywhere, `e` to the rounding of a device's log1p. The tests hold golden values.

torch has no arithmetic on unsigned integers: u32 is held as int32 and u64 as int64, whose sums and
products wrap to the same bits.
"""

import torch
from torch import Tensor


def splitmix64(z: Tensor) -> Tensor:
    """u64 held as int64, elementwise; a bijection."""
    z = z + (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, count: int) -> Tensor:
    """u64's `z >> count`."""
    return z >> count & (1 << 64 - count) - 1


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The keys of R rows: seeds, u64 held as int64 [R], and integer positions [R] -> int64 [R]."""
    return splitmix64(splitmix64(seeds) + positions)


def child_seed(seed: int, index: int) -> int:
    """The seed of a request's answer `index`: the first has its own, the others unrelated ones."""
    if index == 0:
        return seed
    held = torch.tensor([seed - 2**64 if seed >> 63 else seed])
    return int(row_keys(held, torch.tensor([index]))) % 2**64


def _mix(x: Tensor) -> Tensor:
    """u32 held as int32: the shifts need masks."""
    x = x ^ (x >> 16 & 0xFFFF)
    x.mul_(0x7FEB352D)
    x ^= x >> 15 & 0x1FFFF
    x.mul_(0x846CA68B - 2**32)
    x ^= x >> 16 & 0xFFFF
    return x


def random_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """`h` of keys int64 [R] and vocabulary indices [R, W] or [W]: int64 [R, W] below 2**32."""
    low, high = keys.unsqueeze(-1).to(torch.int32), (keys >> 32).unsqueeze(-1).to(torch.int32)
    h = _mix(_mix(ids.to(torch.int32)) * (high | 1) + low)
    return h.to(torch.int64).bitwise_and_(0xFFFFFFFF)


def exponential_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """`e` of keys int64 [R] and vocabulary indices [R, W] or [W]: float32 [R, W], above 0."""
    v = random_bits(keys, ids).to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
    return v.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
