"""Log-probabilities of the model's own distribution: logits as they came, before any processing."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rackmount_registry.ops import Ops


@dataclass(frozen=True, kw_only=True)
class LogprobTensors:
    """L tokens, each with the N most likely in its place.

    A request that asked for fewer than N reads the first of them.
    """

    rows: np.ndarray
    """int64 [L]: which rows of the logits these are."""
    token_ids: Tensor
    """int64 [L, 1 + N]: the token itself, then the most likely in order; equals by lowest id."""
    logprobs: Tensor
    """float32 [L, 1 + N]."""
    ranks: Tensor
    """int64 [L]: 1 + the number of tokens more likely than the token itself."""


def gather_logprobs(
    ops: Ops, rows: np.ndarray, logits: Tensor, token_ids: Tensor, num: int
) -> LogprobTensors:
    """The op `logprobs` of token_ids int64 [L] under logits [L, V], which are those of `rows`: of
    sampled tokens, or of a prompt's under the logits of the positions before them. L may be 0.
    Every row is by itself: a prompt in chunks gives the same values."""
    ids, values, ranks = ops.logprobs(logits, token_ids, num)
    return LogprobTensors(rows=rows, token_ids=ids, logprobs=values, ranks=ranks)
