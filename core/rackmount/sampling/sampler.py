"""From the logits of a batch to one token a row, in three parts. None waits for the device, as long
as the op `sample` does not."""

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.logprobs import LogprobTensors, gather_logprobs, log_softmax
from rackmount.sampling.rules import apply_rules
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import Ops


class Sampler:
    """Samples rows of a `SamplingTable`; a row's token depends on that row alone.

    A step is `process`, `draw` and `finish`, after the table's `flush`. Counts and tokens stay on
    the device, so that the next step may begin before this one's tokens are known to the host:
    what the host must know is in `needs_history`.
    """

    def __init__(self, table: SamplingTable, ops: Ops) -> None:
        self.table = table
        self._ops = ops
        self._rows = np.empty(0, np.int64)
        self._asked = np.empty(0, np.int64)
        """Which of `_rows` want logprobs."""
        self._raw: Tensor | None = None
        """Theirs, of all tokens: float32 [L, V]."""

    def needs_history(self, rows: np.ndarray) -> bool:
        """Whether `process` reads the tokens before the positions of one of these rows: one has a
        grammar, or a bad word of several tokens."""
        return bool(self.table.reads_history[rows].any())

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether `process` and `finish` have nothing to do for these rows."""
        table = self.table
        return not (
            table.has_rules[rows].any()
            or table.penalties.asked(rows).any()
            or (table.num_logprobs[rows] >= 0).any()
        )

    @torch.inference_mode()
    def process(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray
    ) -> Tensor:
        """Applies the rules and penalties of R distinct rows; keeps what `finish` needs.

        Args:
            logits: [R or more, V], any floating dtype; may be changed.
            rows: int [R], admitted rows of the table, or its padding row any number of times.
            positions: int [R], the index that each token takes in its sequence.
            token_ids: int [max_num_seqs, max_model_len], each row's tokens before its position;
                read for the rows of `needs_history` alone.

        Returns:
            `logits` itself where no row asked for a rule or penalty, else in float32 at least.
        """
        table = self.table
        self._rows = rows
        self._asked = np.flatnonzero(table.num_logprobs[rows] >= 0)
        self._raw = None
        if len(self._asked):
            self._raw = log_softmax(logits[index_of(self._asked, logits)])
        if table.has_rules[rows].any() or table.penalties.asked(rows).any():
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            apply_rules(logits, table, rows, positions, token_ids)
            table.penalties.apply(logits, rows)
        return logits

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The op `sample` over the table's state: int32 [R], -1 where a row has no token to give,
        and its request must fail. Holds no host state: it may run in a CUDA graph."""
        return self._ops.sample(logits, rows, positions, self.table.state)

    @torch.inference_mode()
    def finish(self, token_ids: Tensor) -> LogprobTensors | None:
        """Counts the tokens [R or more] of the rows last processed for their penalties, and gives
        the logprobs of those that asked; None where none did. All on the device."""
        self.table.penalties.observe(self._rows, token_ids)
        raw, asked, self._raw = self._raw, self._asked, None
        if raw is None:
            return None
        own = token_ids[index_of(asked, token_ids)].clamp(min=0).long()
        num = int(self.table.num_logprobs[self._rows].max())
        return gather_logprobs(asked, raw, own, num)


def index_of(selected: np.ndarray, batch: Tensor) -> Tensor | slice:
    """An index of the selected rows of a batch, which copies nothing where it is all of them."""
    if len(selected) == len(batch):
        return slice(None)
    return upload(selected, batch.device)
