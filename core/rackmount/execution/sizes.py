"""Sizes of the steps that are captured as CUDA graphs."""

MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Numbers of tokens of the mixed steps that are captured. Larger ones keep the device busy for
longer than the host takes to launch them."""


def decode_sizes(limit: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is the limit itself, so that no batch lacks one.

    Steps grow with the size, so that padding costs at most a fifth from 32 on.
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    steps += range(320, max(limit, 320), 64)
    return [size for size in steps if size < limit] + [limit]
