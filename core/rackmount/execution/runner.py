"""The model over its KV cache: from a flat batch to hidden states."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import FlatBatch, PersistentBatch, padding_step
from rackmount.execution.buffers import StepBuffers, StepTensors
from rackmount.execution.step import PagedStep, Part
from rackmount.rack import Rack
from rackmount.sampling.table import SamplingTable
from rackmount_registry.attention import (
    CACHE_LAYOUTS,
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    DeviceTables,
)
from rackmount_registry.descriptors import AttentionBackend as BackendDescriptor
from rackmount_registry.mount import Mounted
from rackmount_registry.offers import Offer
from rackmount_registry.ops import Ops, prepare
from rackmount_registry.options import instantiate

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits [S, vocabulary], rows and positions [S] to token ids int32 [S]."""


class Runner:
    """Loads steps onto the device and runs the model. `carve` comes before any step."""

    def __init__(
        self, rack: Rack, mounted: Mounted, step: PagedStep, ops: Ops, batch: PersistentBatch
    ) -> None:
        self.rack, self.mounted, self.ops = rack, mounted, ops
        self.step, self._batch = step, batch
        max_tokens = max(rack.config.max_num_batched_tokens, rack.config.max_num_seqs)
        self.buffers = StepBuffers(batch, max_tokens, rack.device)
        self._prefill, self._decode = self._backends()

    def _backends(self) -> tuple[AttentionBackend, AttentionBackend]:
        rack = self.rack
        context = AttentionContext(
            layers=frozenset(rack.draft.attention_params),
            block_size=rack.block_size,
            max_num_seqs=rack.config.max_num_seqs,
            max_num_batched_tokens=rack.config.max_num_batched_tokens,
            max_model_len=rack.max_model_len,
            device=rack.device,
            dtype=rack.dtype,
            kv_dtype=rack.kv_dtype,
        )
        choice = rack.attention
        prefill = cast(AttentionBackend, instantiate(choice.prefill, rack.options, context))
        if choice.decode is choice.prefill:
            return prefill, prefill
        return prefill, cast(AttentionBackend, instantiate(choice.decode, rack.options, context))

    def prepare(self, table: SamplingTable) -> None:
        """Tells the operations of the step how they will be called (see `ops.prepare`): with logits
        as the model gives them, and as they are processed."""
        flat = padding_step(np.ones(1, int), self._batch.padding_row)
        tensors = self.buffers.load(flat)
        prepare(self.ops.build_batch, *self._build_arguments(tensors))
        rows, positions = tensors.sample_rows, tensors.sample_positions
        given = torch.empty(1, table.vocab_size, dtype=self.rack.dtype, device=self.rack.device)
        processed = given.to(torch.promote_types(given.dtype, torch.float32))
        for logits in (given,) if processed is given else (given, processed):
            prepare(self.ops.sample, logits, rows, positions, table.state)
        prepare(self.ops.penalize, *table.penalties.arguments(processed, rows))
        prepare(self.ops.logprobs, given, rows.long(), 1)

    def carve(self, num_kv_blocks: int) -> int:
        """Takes the memory of a pool of so many blocks, in place of any before, and gives its
        bytes."""
        rack = self.rack
        layout = CACHE_LAYOUTS[rack.attention.cache_layout]
        num_slots = num_kv_blocks * rack.block_size
        self.step.caches = []
        self.step.caches = [
            torch.empty(layout.shape(spec, num_slots), dtype=spec.dtype, device=rack.device)
            for spec in rack.draft.cache_specs()
        ]
        return sum(cache.nbytes for cache in self.step.caches)

    def hidden(self, flat: FlatBatch, *, of_all: bool) -> tuple[StepTensors, Tensor]:
        """Runs the model eagerly: the step's tensors, and hidden states of all tokens, [T, hidden],
        or of those that are sampled from, [S, hidden]."""
        tensors = self.buffers.load(flat)
        of_all = of_all or (flat.is_decode and flat.all_sample)
        wanted = None if of_all else tensors.logits_indices
        self.plan(flat, tensors, is_static=False, wanted=wanted)
        self.build(tensors)
        return tensors, self.forward(tensors)

    def plan(
        self,
        flat: FlatBatch,
        tensors: StepTensors,
        *,
        is_static: bool,
        wanted: Tensor | None = None,
    ) -> None:
        """Begins the step that was loaded: the host's work of attention (see
        `AttentionBackend.plan`), and the tokens whose hidden states are wanted."""
        # Two backends: each does its own kind of request, in steps of both kinds too.
        single = 0 if self._decode is self._prefill and not flat.is_decode else flat.num_single
        num_requests, num_tokens = flat.rows.size, int(flat.query_start_loc[-1])
        assert flat.query_start_loc[single] == single, "requests of one token come first"
        choice = self.rack.attention
        parts = [
            Part(
                backend, backend.plan(self._part(flat, tensors, requests, offer, is_static)), tokens
            )
            for backend, offer, requests, tokens in (
                (self._decode, choice.decode, slice(0, single), slice(0, single)),
                (
                    self._prefill,
                    choice.prefill,
                    slice(single, num_requests),
                    slice(single, num_tokens),
                ),
            )
            if requests.start < requests.stop
        ]
        self.step.begin(tensors.positions, tensors.slots, parts, wanted)

    def _part(
        self,
        flat: FlatBatch,
        tensors: StepTensors,
        requests: slice,
        offer: Offer[BackendDescriptor],
        is_static: bool,
    ) -> AttentionBatch:
        """Some of a step's requests, as the backend of `offer` sees them."""
        places = slice(requests.start, requests.stop + 1)
        first = int(flat.query_start_loc[requests.start])
        tables = None
        if offer.descriptor.metadata == "device":
            starts = tensors.query_start_loc[places]
            tables = DeviceTables(
                query_start_loc=starts - first if first else starts,
                seq_lens=tensors.seq_lens[requests],
                block_table=tensors.block_table[requests],
            )
        return AttentionBatch(
            query_start_loc=flat.query_start_loc[places] - first,
            seq_lens=flat.seq_lens[requests],
            rows=flat.rows[requests],
            block_table=self._batch.block_table,
            on_device=tables,
            is_static=is_static,
        )

    def build(self, tensors: StepTensors) -> None:
        """What the device adds to a step that was loaded. May be captured."""
        self.ops.build_batch(*self._build_arguments(tensors))

    def _build_arguments(self, tensors: StepTensors) -> tuple[Any, ...]:
        """Of `ops.build_batch`."""
        return (
            tensors.token_ids,
            tensors.rows,
            tensors.seq_lens,
            self.buffers.last_ids,
            self.buffers.block_tables,
            tensors.block_table,
            self.rack.block_size,
        )

    def forward(self, tensors: StepTensors) -> Tensor:
        """The planned and built step -> hidden states of the wanted tokens. May be captured."""
        return self.mounted.forward(tensors.token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, hidden] -> logits [S, vocabulary]. May be captured."""
        return self.mounted.logits(hidden)

    def sample(self, tensors: StepTensors, logits: Tensor, draw: Draw) -> Tensor:
        """Draws from logits [S, vocabulary] token ids int32 [S], -1 for nothing, which feed the
        rows' next step. May be captured, if `draw` may."""
        token_ids = draw(logits, tensors.sample_rows, tensors.sample_positions)
        self.buffers.last_ids[tensors.sample_rows] = token_ids.clamp(min=0)
        return token_ids
