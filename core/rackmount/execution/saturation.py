"""The start-up check of an FP8 KV cache: whether its scales fit what the model puts into it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import padding_step
from rackmount.execution.runner import Runner
from rackmount_registry.attention import FP8_MAX
from rackmount_registry.errors import listed

NUM_PROMPTS = 16
"""Of random tokens, a block each."""

TOO_MANY = 1e-2
"""Share of a layer's keys or values stored as the largest number that tells of a scale too small.

One that was calibrated does that too, with what is within 4 % of the largest (432 to 448 round to
448). That is next to nothing, but where one channel of the keys hardly varies, it is that channel
of every token: 1 / (G D) of G heads of size D, as much as 0.8 % of a single head of 128. A scale of
half of what it should be puts some 2 % of normal values there."""
TOO_MANY_ZEROS = 0.1
"""Share of a layer's keys or values stored as 0 that tells of a scale too large. With one that fits
these are no larger than two millionths of the largest."""
MAX_LISTED = 4

Saturation = list[tuple[float, float, float, float]]
"""Of each layer, the share of keys, and of values, that were stored as the largest number, and the
shares that were stored as 0."""


def measure(runner: Runner, padding_row: int) -> tuple[int, Saturation]:
    """Runs random tokens into the pool's first block, which nobody uses yet: their number, and what
    became of their keys and values. A pool must be there."""
    rack, caches = runner.rack, runner.step.caches
    limits = rack.block_size, rack.config.max_num_batched_tokens, rack.max_model_len
    length, random = min(limits), np.random.default_rng(0)
    flat = padding_step(np.array([length]), padding_row)
    counts = torch.zeros(len(caches), 4, dtype=torch.int64, device=rack.device)
    for _ in range(NUM_PROMPTS):
        ids = random.integers(rack.draft.vocab_size, size=length).astype(np.int32)
        slots = np.arange(length, dtype=np.int32)
        runner.hidden(replace(flat, token_ids=ids, slots=slots), of_all=True)
        counts += torch.stack([_at_the_ends(cache[:, :length]) for cache in caches])
    for layer in rack.draft.experts:
        layer.state.load.zero_()  # these tokens are nobody's
    sizes = [cache[0, :length].numel() * NUM_PROMPTS for cache in caches]
    shares = (counts.double() / torch.tensor(sizes, device=rack.device).unsqueeze(1)).tolist()
    return NUM_PROMPTS * length, [tuple(each) for each in shares]


def worst(ranks: Sequence[Saturation]) -> Saturation:
    """Of each layer, on whichever rank it is worst."""
    return [tuple(map(max, zip(*shares, strict=True))) for shares in zip(*ranks, strict=True)]


def misfits(shares: Saturation, num_tried: int) -> list[str]:
    """Which layers' scales are too small or too large; empty if none."""
    cut = [(k, v) for k, v, _, _ in shares]
    gone = [(k, v) for _, _, k, v in shares]
    return [
        *_told("small", "the largest FP8 number", "larger", cut, TOO_MANY, num_tried),
        *_told("large", "0", "smaller", gone, TOO_MANY_ZEROS, num_tried),
    ]


def _told(
    size: str, stored: str, other: str, pairs: list[tuple[float, float]], bound: float, num: int
) -> Iterator[str]:
    wrong = {layer: pair for layer, pair in enumerate(pairs) if max(pair) > bound}
    if not wrong:
        return
    ranked = sorted(wrong, key=lambda layer: -max(wrong[layer]))
    layers = [f"{layer} ({wrong[layer][0]:.2%}, {wrong[layer][1]:.2%})" for layer in ranked]
    yield (
        f"KV scales are too {size} in {len(wrong)} of {len(pairs)} layers: of {num} random "
        f"tokens these keys and values were stored as {stored}: layer "
        f"{listed(layers, MAX_LISTED)}; calibrate the model on more text, give a {other} kv_scale "
        "where it has none, or choose kv_cache_dtype='model'"
    )


def _at_the_ends(stored: Tensor) -> Tensor:
    """How many numbers of an FP8 cache [2, N, G, D] are the largest or the smallest, and how many
    are 0: int64 [4], of keys and of values each."""
    largest = torch.tensor(FP8_MAX).to(stored.dtype).view(torch.uint8)
    without_sign = stored.view(torch.uint8) & 0x7F
    found = [(without_sign == end).sum((1, 2, 3)) for end in (int(largest), 0)]
    return torch.cat(found)
