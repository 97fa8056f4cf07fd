"""Steps as CUDA graphs.

A graph is captured for some sizes, the largest first, all on one pool of memory, since only one of
them runs at a time. A step between two sizes runs as the larger one, filled up with padding.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rackmount.execution.batch import FlatBatch, padding_step
from rackmount.execution.buffers import StepTensors
from rackmount.execution.runner import Runner
from rackmount.garbage import collector_paused
from rackmount.sampling.sampler import Sampler
from rackmount_registry.attention import AttentionLayer


class Recorder:
    """Captures graphs on one pool and one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around captures, and the runs that prepare them."""
        torch.cuda.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        # A collection would free what is garbage, and so synchronize, within a capture.
        with torch.cuda.stream(self._stream), collector_paused():
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> torch.cuda.CUDAGraph:
        """Captures from here on, until the graph's `capture_end`. `torch.cuda.graph` would clean up
        around each capture, for tenths of a second."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of `run`, and what it gave."""
        graph = self.begin()
        try:
            out = run()
        finally:
            graph.capture_end()
        return graph, out


@dataclass(frozen=True)
class SamplingGraph:
    """A captured sampling from the hidden states that the model's graph leaves."""

    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    """int32 [size], where the graph leaves it."""


@dataclass(frozen=True, kw_only=True)
class DecodeGraph:
    """A captured step of one batch size: one launch for the model, one for sampling."""

    model: torch.cuda.CUDAGraph
    plain: SamplingGraph
    """For rows that ask for nothing but a draw."""
    processed: SamplingGraph
    """For rows that may ask for anything."""
    logits: Tensor
    """[size, vocabulary], where `processed` leaves them as the model gave them; that of another
    size overwrites them."""


class DecodeGraphs:
    """Decode steps of a runner whose caches stay where they are."""

    def __init__(self, runner: Runner, sampler: Sampler, padding_row: int) -> None:
        self._runner, self._sampler, self._padding_row = runner, sampler, padding_row
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes: list[int] = []
        self._recorder = Recorder()
        self._logits = torch.empty(0)
        """[largest size, vocabulary]."""

    def capture(self, sizes: Iterable[int]) -> None:
        """Captures steps of so many requests."""
        with self._recorder.session():
            for size in sorted(sizes, reverse=True):
                self._graphs[size] = self._capture_one(size)
        self._sizes = sorted(self._graphs)

    def _capture_one(self, size: int) -> DecodeGraph:
        flat = padding_step(np.ones(size, int), self._padding_row)
        runner, tensors = self._runner, self._runner.buffers.load(flat)
        runner.plan(flat, tensors, is_static=True)

        def model() -> Tensor:
            runner.build(tensors)
            return runner.forward(tensors)

        def plain(hidden: Tensor) -> Tensor:
            return runner.sample(tensors, runner.logits(hidden), self._sampler.draw)

        def processed(hidden: Tensor) -> Tensor:
            logits = self._logits[:size].copy_(runner.logits(hidden))
            return runner.sample(tensors, logits, self._sampler.draw_processed)

        hidden = model()  # compiles and takes workspaces before it is captured
        if not self._graphs:  # the largest comes first
            self._logits = torch.empty_like(runner.logits(hidden))
        plain(hidden)
        processed(hidden)
        model_graph, hidden = self._recorder.record(model)
        return DecodeGraph(
            model=model_graph,
            plain=SamplingGraph(*self._recorder.record(lambda: plain(hidden))),
            processed=SamplingGraph(*self._recorder.record(lambda: processed(hidden))),
            logits=self._logits[:size],
        )

    def replay(self, flat: FlatBatch) -> DecodeGraph:
        """Runs the model on a decode step: the graph, whose sampling has not run."""
        size = self._sizes[bisect_left(self._sizes, flat.rows.size)]
        graph = self._graphs[size]
        padded = flat.padded(size, self._padding_row)
        if self._runner.rack.attention.decode.descriptor.metadata == "host":
            tensors = self._runner.buffers.load(padded)
            self._runner.plan(padded, tensors, is_static=True)
        else:
            self._runner.buffers.send(padded)
        graph.model.replay()
        return graph


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What runs before an attention layer, and the layer."""

    graph: torch.cuda.CUDAGraph
    layer: AttentionLayer
    q: Tensor
    """[size, H, D], where the graph leaves it."""
    out: Tensor
    """[size, H, D], where the next piece looks for what the layer gives."""


@dataclass(frozen=True, kw_only=True)
class BrokenGraph:
    """A captured forward of one number of tokens, broken at the attention layers, whose work is
    another in every step."""

    tensors: StepTensors
    """What it was captured with."""
    pieces: list[Piece]
    last: torch.cuda.CUDAGraph
    hidden: Tensor


class MixedGraphs:
    """Small mixed steps of a runner whose caches stay where they are."""

    def __init__(self, runner: Runner, padding_row: int) -> None:
        self._runner, self._padding_row = runner, padding_row
        self._graphs: dict[int, BrokenGraph] = {}
        self._sizes: list[int] = []
        self._recorder = Recorder()
        self._queries: dict[torch.Size, Tensor] = {}
        self._outs: dict[torch.Size, Tensor] = {}
        """By shape of a token's heads, for as many tokens as the largest graph has: what goes into
        attention, and what comes out. All share them, since each is read before the next is
        written, so that a graph keeps no layer's queries."""

    def capture(self, sizes: Iterable[int]) -> None:
        """Captures forwards of so many tokens."""
        with self._recorder.session():
            for size in sorted(sizes, reverse=True):
                self._graphs[size] = self._capture_one(size)
        self._sizes = sorted(self._graphs)

    def _capture_one(self, size: int) -> BrokenGraph:
        runner = self._runner
        flat = padding_step(np.array([size]), self._padding_row)
        tensors, _ = runner.hidden(flat, of_all=True)  # compiles before it is captured
        pieces: list[Piece] = []
        graph = self._recorder.begin()

        def interrupt(layer: AttentionLayer, q: Tensor) -> Tensor:
            nonlocal graph
            num_tokens, heads = q.shape[0], q.shape[1:]
            if heads not in self._queries:  # the largest comes first
                self._queries[heads] = torch.empty_like(q)
            kept = self._queries[heads][:num_tokens].copy_(q)
            graph.capture_end()
            if heads not in self._outs:
                self._outs[heads] = torch.zeros_like(q)
            out = self._outs[heads][:num_tokens]
            pieces.append(Piece(graph=graph, layer=layer, q=kept, out=out))
            graph = self._recorder.begin()
            return out

        runner.step.interrupt = interrupt
        try:
            hidden = runner.forward(tensors)
        finally:
            runner.step.interrupt = None
            graph.capture_end()
        return BrokenGraph(tensors=tensors, pieces=pieces, last=graph, hidden=hidden)

    def fits(self, flat: FlatBatch) -> bool:
        """Whether the step is no larger than what was captured."""
        return bool(self._sizes) and flat.token_ids.size <= self._sizes[-1]

    def replay(self, flat: FlatBatch) -> tuple[StepTensors, Tensor]:
        """Runs the model: the step's tensors, and hidden states [T, hidden]."""
        num_tokens, runner = flat.token_ids.size, self._runner
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        graph = self._graphs[size]
        tensors = runner.buffers.load(flat.with_tokens(size))
        assert tensors.slots.data_ptr() == graph.tensors.slots.data_ptr()
        runner.plan(flat, tensors, is_static=False)
        runner.build(tensors)
        for piece in graph.pieces:
            piece.graph.replay()
            piece.out[:num_tokens].copy_(runner.step.run(piece.layer, piece.q[:num_tokens]))
        graph.last.replay()
        return tensors, graph.hidden[:num_tokens]
