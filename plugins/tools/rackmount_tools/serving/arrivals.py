"""When requests come."""

import math

import numpy as np


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the first request to each; the first is at 0.

    The time between two is gamma distributed with mean 1 / `rate` and shape `burstiness`: 1 is a
    Poisson process, less comes in bursts, more is more even. All come at once where the rate is
    infinite.
    """
    if math.isinf(rate):
        return [0.0] * count
    scale = 1 / (rate * burstiness)
    gaps = np.random.default_rng(seed).gamma(burstiness, scale, count)
    gaps[:1] = 0
    return np.cumsum(gaps).tolist()
