"""Repetition, frequency and presence penalties: token counts, kept for the rows that asked."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.params import SamplingParams


class Penalties:
    """A row that asks for a penalty takes a slot in a pool of counts, which grows on demand."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._slots = np.full(max_num_seqs, -1)
        self._factors = np.zeros((max_num_seqs, 3))
        self._free: list[int] = []
        self._num_output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def admit(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """Counts a row's tokens so far, unless it asks for no penalty."""
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if factors == (1, 0, 0):
            return
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        self._factors[row] = factors
        tokens = np.array([*prompt_token_ids, *output_token_ids], np.int64)
        ids = upload(tokens, self._in_prompt.device)
        prompt, outputs = ids[: len(prompt_token_ids)], ids[len(prompt_token_ids) :]
        ones = torch.ones_like(outputs, dtype=torch.int32)
        self._num_output[slot].zero_().scatter_add_(0, outputs, ones)
        self._in_prompt[slot].zero_().index_fill_(0, prompt, True)

    def release(self, row: int) -> None:
        """Gives the row's slot back, if it has one."""
        if self._slots[row] >= 0:
            self._free.append(int(self._slots[row]))
            self._slots[row] = -1

    def asked(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows [R] asked for a penalty: bool [R]."""
        asked: np.ndarray = self._slots[rows] >= 0
        return asked

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        """Changes logits [R or more, V] in place, of those among rows [R] that asked."""
        asked = np.flatnonzero(self.asked(rows))
        if not len(asked):
            return
        at, slots = self._indices(rows, asked)
        factors = self._factors[rows[asked]]
        given = upload(factors, logits.device).to(logits.dtype)
        repetition, frequency, presence = given.T.unsqueeze(-1)
        x, num_output = logits[at], self._num_output[slots]
        in_output = num_output > 0
        if (factors[:, 0] != 1).any():
            repeated = torch.where(x > 0, x / repetition, x * repetition)
            x = torch.where(self._in_prompt[slots] | in_output, repeated, x)
        if factors[:, 1:].any():
            x -= frequency * num_output + presence * in_output
        logits[at] = x

    def observe(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Counts the tokens [R or more] that were sampled for rows [R]; one of -1 as id 0."""
        asked = np.flatnonzero(self.asked(rows))
        if len(asked):
            at, slots = self._indices(rows, asked)
            self._num_output[slots, token_ids[at].clamp(min=0).long()] += 1

    def _indices(self, rows: np.ndarray, asked: np.ndarray) -> Tensor:
        """Places in the batch and slots: int64 [2, asked]."""
        return upload(np.stack((asked, self._slots[rows[asked]])), self._in_prompt.device)

    def _grow(self) -> None:
        size, width = self._in_prompt.shape
        new = max(4, size)
        self._free += range(size, size + new)
        self._num_output = torch.cat([self._num_output, self._num_output.new_zeros(new, width)])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(new, width)])
