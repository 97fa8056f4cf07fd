"""`logit_bias`, the second of the logit processors."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rackmount.sampling.params import MAX_BIASES
from rackmount.sampling.processor import LogitProcessor
from rackmount_registry.ops import Ops


class Biases(LogitProcessor):
    """Of each of the table's rows, ids and what their logits get: always as many ids, each once, so
    that no two additions meet. Those that nobody asked for get -0.0, which leaves every number as
    it is, where 0.0 makes 0.0 of -0.0."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_ids = min(MAX_BIASES, vocab_size)
        super().__init__(num_rows, self._pack({}), device)

    def admit(self, row: int, bias: Mapping[int, float]) -> None:
        """The row has this one, of at most `MAX_BIASES` ids."""
        self.set(row, self._pack(bias))

    def apply(self, logits: Tensor, rows: Tensor, ops: Ops) -> None:
        """Adds to the logits what the rows have."""
        packed = self.on_device.index_select(0, rows)
        ids, bits = torch.split(packed, self._num_ids, 1)
        ids = ids.long()
        logits.scatter_(1, ids, logits.gather(1, ids) + bits.view(torch.float32))

    def _pack(self, bias: Mapping[int, float]) -> np.ndarray:
        """Ids, then the bits of float32 values."""
        given = np.fromiter(bias, np.int32)
        others = np.setdiff1d(np.arange(self._num_ids), given)[: self._num_ids - given.size]
        values = np.full(self._num_ids, -0.0, np.float32)
        values[: given.size] = list(bias.values())
        return np.concatenate((given, others, values.view(np.int32)), dtype=np.int32)
