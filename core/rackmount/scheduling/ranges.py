"""Many ranges as one array."""

import numpy as np


def spread(
    owners: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The `counts[i]` numbers from `starts[i]` on for every i, end to end, and the owner of each.

    Counts are at least 1; the arrays given come back where all of them are 1.
    """
    stops = np.cumsum(counts)
    if not counts.size or stops[-1] == counts.size:
        return owners, starts
    first = np.repeat(starts - stops + counts, counts)
    return np.repeat(owners, counts), first + np.arange(first.size)
