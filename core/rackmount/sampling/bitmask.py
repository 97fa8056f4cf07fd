"""Bitmasks over the vocabulary: bit i % 32 of word i // 32 is set where token i may be drawn."""

from collections.abc import Iterable

import numpy as np


def num_words(vocab_size: int) -> int:
    """Of a bitmask, in int32."""
    return -(-vocab_size // 32)


def ban(bitmask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clears the bits of the tokens in an int32 bitmask; what it has no bit for, which only a
    tokenizer knows, is never drawn."""
    ids = np.array(list(token_ids), np.uint32)
    ids = ids[ids < 32 * bitmask.size]
    np.bitwise_and.at(bitmask.view(np.uint32), ids // 32, ~(np.uint32(1) << ids % 32))
