"""Sizes of the steps that are captured as CUDA graphs."""


def mixed_sizes(limit: int) -> list[int]:
    """Numbers of tokens of the mixed steps to capture, ascending, up to the limit itself.

    As long as a step is bound by reading the weights, padding costs little.
    """
    return _up_to(limit, [16, 32, 64, *range(128, 513, 64), *range(640, max(limit, 640), 128)])


def decode_sizes(limit: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is the limit itself, so that no batch lacks one.

    From 32 requests on, padding is at most a fifth of the captured step.
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    steps += range(320, max(limit, 320), 64)
    return _up_to(limit, steps)


def _up_to(limit: int, steps: list[int]) -> list[int]:
    return [size for size in steps if size < limit] + [limit]
