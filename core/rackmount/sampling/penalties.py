"""Repetition, frequency and presence penalties, the last of the logit processors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.processor import LogitProcessor
from rackmount_registry.ops import IN_PROMPT, Ops


class Penalties(LogitProcessor):
    """Factors of the table's rows, the bits of float64: repetition, frequency, presence; and token
    counts, as the op `penalize` reads them. Neutral factors leave every number as it is, whatever
    was counted.

    The counts take 4 bytes a row and token, 156 MB for 256 requests of a vocabulary of 151,936: a
    CUDA graph reads and updates them where they are. A CPU has memory for what was written alone.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_rows, np.array([1.0, 0.0, 0.0]).view(np.int32), device)
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)

    def admit(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """The row has the penalties of `params`, after these tokens."""
        factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.set(row, np.array(factors, np.float64).view(np.int32))
        if not self.asked[row]:
            return
        tokens = np.array([*prompt_token_ids, *output_token_ids], np.int64)
        ids = upload(tokens, self._counts.device)
        prompt, outputs = ids[: len(prompt_token_ids)], ids[len(prompt_token_ids) :]
        counts = self._counts[row].zero_().index_fill_(0, prompt, IN_PROMPT)
        counts.scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def arguments(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of `ops.penalize`, for logits [R, V] of the rows [R]."""
        return logits, rows, self.on_device.view(torch.float64), self._counts

    def apply(self, logits: Tensor, rows: Tensor, ops: Ops) -> None:
        """See `LogitProcessor`."""
        ops.penalize(*self.arguments(logits, rows))

    def observe(self, rows: Tensor, token_ids: Tensor) -> None:
        """Counts the tokens int32 [R] that were sampled for the rows [R]; one of -1 as id 0."""
        places = rows.long() * self._counts.shape[1] + token_ids.clamp(min=0)
        self._counts.view(-1).scatter_add_(0, places, torch.ones_like(token_ids))
