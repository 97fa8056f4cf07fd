"""Sizes that the launches of these kernels share."""

import triton

VECTOR_BYTES = 16
"""Widest access of a thread."""
LANES = 32
MAX_WARPS = 16


def warps_for(num_elements: int, itemsize: int, vectors: int) -> int:
    """Warps for a tile of a power of two of elements: its threads load `vectors` vectors each, as
    far as warps go."""
    return max(1, min(MAX_WARPS, num_elements * itemsize // (VECTOR_BYTES * LANES * vectors)))


def block_of(num_columns: int, most: int = 1 << 30) -> int:
    """The least power of two that holds the columns, but not above `most`."""
    return min(most, triton.next_power_of_2(max(1, num_columns)))
