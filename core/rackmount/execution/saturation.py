"""The start-up check of an FP8 KV cache: whether its scales fit what the model puts into it."""

from collections.abc import Sequence
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
MAX_LISTED = 4

Saturation = list[tuple[float, float]]
"""Of each layer, the share of keys, and of values, that were stored as the largest number."""


def measure(runner: Runner, padding_row: int) -> tuple[int, Saturation]:
    """Runs random tokens into the pool's first block, which nobody uses yet: their number, and what
    became of their keys and values. A pool must be there."""
    rack, caches = runner.rack, runner.step.caches
    limits = rack.block_size, rack.config.max_num_batched_tokens, rack.max_model_len
    length, random = min(limits), np.random.default_rng(0)
    flat = padding_step(np.array([length]), padding_row)
    counts = torch.zeros(len(caches), 2, dtype=torch.int64, device=rack.device)
    for _ in range(NUM_PROMPTS):
        ids = random.integers(rack.draft.vocab_size, size=length).astype(np.int32)
        slots = np.arange(length, dtype=np.int32)
        runner.hidden(replace(flat, token_ids=ids, slots=slots), of_all=True)
        counts += torch.stack([_at_the_end(cache[:, :length]) for cache in caches])
    for layer in rack.draft.experts:
        layer.state.load.zero_()  # these tokens are nobody's
    sizes = [cache[0, :length].numel() * NUM_PROMPTS for cache in caches]
    shares = [(k / n, v / n) for (k, v), n in zip(counts.tolist(), sizes, strict=True)]
    return NUM_PROMPTS * length, shares


def worst(ranks: Sequence[Saturation]) -> Saturation:
    """Of each layer, on whichever rank it is worst."""
    return [
        (max(k for k, _ in shares), max(v for _, v in shares))
        for shares in zip(*ranks, strict=True)
    ]


def too_small(shares: Saturation, num_tried: int) -> str:
    """Which layers' scales are; empty if none."""
    cut = {layer: pair for layer, pair in enumerate(shares) if max(pair) > TOO_MANY}
    if not cut:
        return ""
    ranked = sorted(cut, key=lambda layer: -max(cut[layer]))
    layers = [f"{layer} ({cut[layer][0]:.2%}, {cut[layer][1]:.2%})" for layer in ranked]
    return (
        f"KV scales are too small in {len(cut)} of {len(shares)} layers: of {num_tried} random "
        "tokens these keys and values were stored as the largest FP8 number: layer "
        f"{listed(layers, MAX_LISTED)}; calibrate the model on more text, give a larger kv_scale "
        "where it has none, or choose kv_cache_dtype='model'"
    )


def _at_the_end(stored: Tensor) -> Tensor:
    """How many numbers of an FP8 cache [2, N, G, D] are the largest or the smallest: int64 [2]."""
    largest = torch.tensor(FP8_MAX).to(stored.dtype).view(torch.uint8)
    without_sign = stored.view(torch.uint8) & 0x7F
    return (without_sign == int(largest)).sum((1, 2, 3))
