"""Log-probabilities of the model's own distribution: logits as they came, before any processing."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount_registry.sampling.order import largest


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


def log_softmax(logits: Tensor) -> Tensor:
    """[L, V] -> float32 [L, V], computed in float64 where the logits are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).float()


def gather_logprobs(
    rows: np.ndarray, logprobs: Tensor, token_ids: Tensor, num: int
) -> LogprobTensors:
    """From logprobs [L, V] those of token_ids [L] and of the `num` most likely tokens."""
    ids = token_ids.unsqueeze(-1)
    if num:
        ids = torch.cat([ids, largest(logprobs, num)], -1)
    gathered = logprobs.gather(-1, ids)
    ranks = (logprobs > gathered[:, :1]).sum(-1) + 1
    return LogprobTensors(rows=rows, token_ids=ids, logprobs=gathered, ranks=ranks)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, target_ids: Tensor, num: int) -> LogprobTensors:
    """Of prompt tokens target_ids [T] under the logits [T, V] of the positions before them.

    `num` most likely tokens beside each; T may be 0. Every row is by itself: a prompt in chunks
    gives the same values.
    """
    return gather_logprobs(np.arange(len(logits)), log_softmax(logits), target_ids, num)
