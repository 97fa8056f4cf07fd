"""Sizes of the steps that are captured as CUDA graphs."""

from rackmount_registry.mount import Draft
from rackmount_registry.nn import Experts, OutputHead

LAYER_MULTIPLICATIONS = 225 * 10**9
"""They take an H200 as long as its host takes to launch a layer: some 0.75 ms. Hosts of 0.6 and of
1.1 ms were seen."""
FEWEST_TOKENS, MOST_TOKENS = 256, 2048


def mixed_limit(draft: Draft) -> int:
    """Tokens of the largest mixed step to capture, unless told otherwise: one that takes the GPU as
    long as the host takes to launch it, within bounds for what each size costs at the start."""
    tokens = LAYER_MULTIPLICATIONS * len(draft.attention) // max(1, multiplications(draft))
    return max(FEWEST_TOKENS, min(MOST_TOKENS, tokens // 128 * 128))


def multiplications(draft: Draft) -> int:
    """Of a token with the weights of all layers."""
    total = 0.0
    for socket in (it for it in draft.sockets if not isinstance(it, OutputHead)):
        used = socket.routing.top_k / socket.experts.count if isinstance(socket, Experts) else 1
        for weight in socket.weights():
            matrices = weight.num_matrices * (used if weight.role == "expert" else 1)
            total += matrices * sum(weight.parts) * weight.in_features
    return round(total)


def mixed_sizes(limit: int) -> list[int]:
    """Numbers of tokens of the mixed steps to capture, ascending, up to the limit itself.

    As long as a step is bound by reading the weights, padding costs little, and beyond that it
    costs less than the host does: so these are few, for the time that each takes to capture.
    """
    return _up_to(limit, [16, 32, 64, 128, 192, 256, 384, 512, 768, *range(1024, limit, 512)])


def decode_sizes(limit: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is the limit itself, so that no batch lacks one.

    From 32 requests on, padding is at most a fifth of the captured step.
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    return _up_to(limit, [*steps, *range(320, limit, 64)])


def _up_to(limit: int, steps: list[int]) -> list[int]:
    return [size for size in steps if size < limit] + [limit]
