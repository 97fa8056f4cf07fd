"""From the logits of a batch to one token a row. Nothing waits for the device, as long as the ops
do not."""

import numpy as np
import torch
from torch import Tensor

from rackmount.device import upload
from rackmount.sampling.logprobs import LogprobTensors, gather_logprobs
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import Ops

BLOCK_LOGITS = 2**22
"""How many are processed at once: what is computed of them then stays in a GPU's cache, and takes
little memory."""


class Sampler:
    """Samples rows of a `SamplingTable`; a row's token depends on that row alone.

    A step is `prepare`, `draw` or `draw_processed`, and `logprobs`. What draws is enqueued work
    alone, on what lies at fixed places, and may be captured. Counts and tokens stay on the device,
    so that the next step may begin before this one's tokens are known to the host: what the host
    must know is in `needs_history`.
    """

    def __init__(self, table: SamplingTable, ops: Ops) -> None:
        self.table = table
        self._ops = ops

    def needs_history(self, rows: np.ndarray) -> bool:
        """Whether `prepare` reads the tokens before the positions of one of these rows: one has a
        grammar, or a bad word of several tokens."""
        return bool(self.table.masks.reads_history[rows].any())

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether `draw` does for these rows, as prepared, and `logprobs` has none to give."""
        asked = [each.asked[rows] for each in self.table.processors]
        return not np.any([*asked, self.table.num_logprobs[rows] >= 0])

    def prepare(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Brings to the device what it does not have yet of what R distinct rows ask for.

        Args:
            rows: int [R], admitted rows of the table.
            positions: int [R], the index that each token takes in its sequence.
            token_ids: int [max_num_seqs, max_model_len], each row's tokens before its position;
                read for the rows of `needs_history` alone.
        """
        self.table.masks.compose(rows, positions, token_ids)
        self.table.flush()

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The op `sample` over the table's state: int32 [R], -1 where a row has no token to give,
        and its request must fail.

        Args:
            logits: [R, V], any floating dtype; may be changed.
            rows: integers [R], distinct, but for the table's padding row.
        """
        return self._ops.sample(logits, rows, positions, self.table.state)

    @torch.inference_mode()
    def draw_processed(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """As `draw`, for rows that may ask for anything: leaves the logits as they are, and counts
        the tokens."""
        token_ids = self.draw(self.process(logits, rows), rows, positions)
        self.table.penalties.observe(rows, token_ids)
        return token_ids

    @torch.inference_mode()
    def process(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, V] as the rows [R] ask, in float32 at least; those of a row that asks for
        nothing are the same numbers."""
        processed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        size = max(1, BLOCK_LOGITS // logits.shape[1])
        blocks = zip(torch.split(processed, size), torch.split(rows, size), strict=True)
        for some, of_rows in blocks:
            for processor in self.table.processors:
                processor.apply(some, of_rows, self._ops)
        return processed

    @torch.inference_mode()
    def logprobs(
        self, logits: Tensor, rows: np.ndarray, token_ids: Tensor
    ) -> LogprobTensors | None:
        """Of the tokens [R or more] that were drawn for rows [R] from logits [R or more, V], as the
        model gave them: for those rows that asked; None where none did."""
        wanted = self.table.num_logprobs[rows]
        asked = np.flatnonzero(wanted >= 0)
        if not len(asked):
            return None
        at = slice(None) if len(asked) == len(logits) else upload(asked, logits.device)
        own = token_ids[at].clamp(min=0).long()
        return gather_logprobs(self._ops, asked, logits[at], own, int(wanted.max()))
