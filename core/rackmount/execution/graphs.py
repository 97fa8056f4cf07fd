"""Decode steps as CUDA graphs: one launch for the model, one for sampling.

A graph is captured for each of some batch sizes, the largest first, all on one pool of memory,
since only one of them runs at a time. A batch between two sizes runs as the larger one, filled up
with padding.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import FlatBatch
from rackmount.execution.buffers import StepTensors
from rackmount.execution.runner import Runner

Sample = Callable[[Tensor, StepTensors], Tensor]
"""Logits [S, vocabulary] -> token ids int32 [S] on the device."""


def sizes(limit: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is the limit itself, so that no batch lacks one.

    Steps grow with the size, so that padding costs at most an eighth from 64 on.
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    steps += range(320, max(limit, 320), 64)
    return [size for size in steps if size < limit] + [limit]


@dataclass(frozen=True, kw_only=True)
class DecodeGraph:
    """A captured step of one batch size."""

    model: torch.cuda.CUDAGraph
    hidden: Tensor
    """[size, hidden], where the model's graph leaves it."""
    sampling: torch.cuda.CUDAGraph
    token_ids: Tensor
    """int32 [size], where the sampling graph leaves it."""


class DecodeGraphs:
    """Graphs of a runner whose caches stay where they are."""

    def __init__(self, runner: Runner, sample: Sample, padding_row: int) -> None:
        self._runner, self._sample, self._padding_row = runner, sample, padding_row
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes: list[int] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own

    def capture(self, batch_sizes: list[int]) -> None:
        """Captures steps of these sizes."""
        gc.collect()  # nothing may be freed, and so synchronize, within a capture
        torch.cuda.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for size in sorted(batch_sizes, reverse=True):
                self._graphs[size] = self._capture_one(size)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._sizes = sorted(self._graphs)

    def _capture_one(self, size: int) -> DecodeGraph:
        flat = _padding(size, self._padding_row)
        runner, tensors = self._runner, self._runner.buffers.load(flat)
        runner.plan(flat, tensors, is_static=True)

        def sampling(hidden: Tensor) -> Tensor:
            token_ids = self._sample(runner.logits(hidden), tensors)
            runner.remember(tensors, token_ids)
            return token_ids

        sampling(runner.forward(tensors))  # compiles and takes workspaces before it is captured
        model, hidden = self._record(lambda: runner.forward(tensors))
        sampler, token_ids = self._record(lambda: sampling(hidden))
        return DecodeGraph(model=model, hidden=hidden, sampling=sampler, token_ids=token_ids)

    def _record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Like `torch.cuda.graph`, without its cleaning up around each capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = run()
        finally:
            graph.capture_end()
        return graph, out

    def replay(self, flat: FlatBatch) -> tuple[FlatBatch, StepTensors, DecodeGraph]:
        """Runs the model on a decode step: the step as padded, its tensors, and the graph, whose
        sampling has not run."""
        size = self._sizes[bisect_left(self._sizes, flat.rows.size)]
        graph = self._graphs[size]
        padded = flat.padded(size, self._padding_row)
        tensors = self._runner.buffers.load(padded)
        if self._runner.decode_offer.descriptor.metadata == "host":
            self._runner.plan(padded, tensors, is_static=True)
        graph.model.replay()
        return padded, tensors, graph


def _padding(size: int, padding_row: int) -> FlatBatch:
    """A decode step of nothing but padding."""
    none = np.empty(0, np.int32)
    empty = FlatBatch(
        token_ids=none,
        positions=none,
        slots=none,
        query_start_loc=np.zeros(1, np.int32),
        seq_lens=none,
        rows=none,
        logits_indices=none,
        sample_rows=none,
        sample_positions=none,
    )
    return empty.padded(size, padding_row)
