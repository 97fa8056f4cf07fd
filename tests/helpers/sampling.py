"""The sampler, as a worker uses it, and the rows that the op `sample` reads."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.logprobs import LogprobTensors
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import reference_ops
from rackmount_registry.sampling import SamplingState


class Sampled(NamedTuple):
    token_ids: Tensor
    """int32 [R]; -1 where a row has no token to give."""
    logprobs: LogprobTensors | None


def sample(
    table: SamplingTable,
    logits: Tensor,
    rows: np.ndarray,
    positions: np.ndarray,
    token_ids: np.ndarray,
) -> Sampled:
    """Samples one token for each of the rows by the definitions, and counts it."""
    sampler = Sampler(table, reference_ops())
    sampler.prepare(rows, positions, token_ids)
    draw = sampler.draw if sampler.is_plain(rows) else sampler.draw_processed
    sampled = draw(logits, upload(rows, table.device), upload(positions, table.device))
    return Sampled(sampled, sampler.logprobs(logits, rows, sampled))


def state_of(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
) -> SamplingState:
    """A state whose rows are those of the parameters, with a padding row at the end."""
    table = SamplingTable(len(params), vocab_size, torch.device(device))
    for row, given in enumerate(params):
        table.admit(row, given, seed=2**64 - 1 - row, prompt_token_ids=[0])
    table.flush()
    return table.state
