"""The step over the paged KV cache, as sockets see it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import FlatBatch
from rackmount_registry.attention import AttentionBackend, AttentionBatch, AttentionLayer


class PagedStep:
    """Hands each attention layer to the backend of the step, with its cache and the step's plan."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self._caches: list[Tensor] = []

    def mount(
        self, prefill: AttentionBackend, decode: AttentionBackend, caches: list[Tensor]
    ) -> None:
        """Gives the backends, which may be one, and a cache per attention layer, in a layout that
        both share."""
        self._prefill, self._decode, self._caches = prefill, decode, caches

    def begin(self, flat: FlatBatch, block_table: np.ndarray) -> None:
        """The next forward computes `flat`. A step where every request has one token is a decode
        step."""
        self.positions = torch.from_numpy(flat.positions).to(self.device)
        is_decode = len(flat.positions) == len(flat.rows)
        self._backend = self._decode if is_decode else self._prefill
        self._plan: Any = self._backend.plan(
            AttentionBatch(
                query_start_loc=flat.query_start_loc,
                seq_lens=flat.seq_lens,
                rows=flat.rows,
                block_table=block_table,
                slot_mapping=torch.from_numpy(flat.slot_mapping[0]).to(self.device),
            )
        )

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `rackmount_registry.step.Step`."""
        q, k = layer.rotate(q, k)
        cache = self._caches[layer.index]
        self._backend.write(cache, k, v, self._plan)
        return self._backend.run(q, cache, self._plan, layer.params)
