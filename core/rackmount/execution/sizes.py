"""Sizes of the steps that are captured as CUDA graphs."""

MIXED_SIZES = (16, 32, 64, 128, 192, 256)
"""Numbers of tokens of the mixed steps that are captured: as long as a step is bound by reading the
weights, padding costs little, and the host takes longer to launch it than the device to run it."""


def decode_sizes(limit: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is the limit itself, so that no batch lacks one.

    From 32 requests on, padding is at most a fifth of the captured step.
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    steps += range(320, max(limit, 320), 64)
    return [size for size in steps if size < limit] + [limit]
