"""What the device knows of each row that may be sampled."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor


class Draw(IntEnum):
    """How a row's token is found: by its own parameters, never by its batch-mates'."""

    GREEDY = 0
    WHOLE = 1
    """From the whole vocabulary, unordered: neither top-k nor top-p."""
    TOP_K = 2
    """From the k most likely tokens, with or without top-p."""
    TOP_P = 3
    """From the whole vocabulary in order: top-p without top-k."""


@dataclass(frozen=True, kw_only=True)
class SamplingState:
    """One row for each of the engine's N rows, and row N for padding, which stays GREEDY.

    The tensors stay where they are and are changed in place: a CUDA graph may read them.
    """

    draws: Tensor
    """int8 [N + 1]: a `Draw`."""
    numbers: Tensor
    """float64 [N + 1, 4]: temperature, at most 1e30; top_k, from 1 to the vocabulary's size, which
    is off; top_p, off at 2; log(min_p), off at -inf. Not read where GREEDY."""
    seeds: Tensor
    """int64 [N + 1]: the bits of a uint64."""

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device) -> Self:
        """A state whose rows are all GREEDY."""
        size = num_rows + 1
        return cls(
            draws=torch.zeros(size, dtype=torch.int8, device=device),
            numbers=torch.zeros(size, 4, dtype=torch.float64, device=device),
            seeds=torch.zeros(size, dtype=torch.int64, device=device),
        )
