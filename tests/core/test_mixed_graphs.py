"""Graphs of mixed steps, without a GPU: what is captured runs eagerly, and what is replayed leaves
what a test says."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import tiny_engine

from rackmount import Engine
from rackmount.execution import graphs
from rackmount.execution.batch import padding_step
from rackmount.execution.graphs import MixedGraphs
from rackmount.execution.worker import Worker

NUM_LAYERS = 3


@dataclass
class Graph:
    """In the place of a `torch.cuda.CUDAGraph`."""

    journal: list["Graph"]
    is_open: bool = True

    def capture_end(self) -> None:
        assert self.is_open
        self.is_open = False

    def replay(self) -> None:
        assert not self.is_open
        self.journal.append(self)


@dataclass
class Recorder:
    """In the place of `graphs.Recorder`."""

    journal: list[Graph] = field(default_factory=list)

    def session(self) -> Any:
        return nullcontext()

    def begin(self) -> Graph:
        return Graph(self.journal)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=NUM_LAYERS)
    with tiny_engine(folder) as engine:
        yield engine


@pytest.fixture
def captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Worker, MixedGraphs]]:
    monkeypatch.setattr(graphs, "Recorder", Recorder)
    worker = engine.core.executor._program._worker
    mixed = MixedGraphs(worker._runner, worker.batch.padding_row)
    with torch.inference_mode():
        mixed.capture([6, 16, 11])
        yield worker, mixed


def test_all_layers_of_all_sizes_share_what_lies_between_graphs(
    captured: tuple[Worker, MixedGraphs],
) -> None:
    _, mixed = captured
    assert list(mixed._graphs) == [16, 11, 6], "the largest makes the room"
    pieces = [(size, piece) for size, graph in mixed._graphs.items() for piece in graph.pieces]
    assert len(pieces) == 3 * NUM_LAYERS
    assert all(len(piece.q) == len(piece.out) == size for size, piece in pieces)
    assert len({piece.q.data_ptr() for _, piece in pieces}) == 1
    assert len({piece.out.data_ptr() for _, piece in pieces}) == 1
    assert len({id(piece.graph) for _, piece in pieces}) == 3 * NUM_LAYERS
    assert not any(piece.graph.is_open for _, piece in pieces)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 6), (6, 6), (7, 11), (12, 16), (16, 16)])
def test_a_step_runs_as_the_least_size_that_holds_it(
    captured: tuple[Worker, MixedGraphs],
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    size: int,
) -> None:
    """Attention sees the step's own tokens, and what it gives goes where the next graph looks."""
    worker, mixed = captured
    flat = padding_step(np.array([num_tokens]), worker.batch.padding_row)
    graph = mixed._graphs[size]
    between = graph.pieces[0]
    between.q.copy_(torch.randn_like(between.q))
    between.out.fill_(77)
    journal, seen = mixed._recorder.journal, []

    def run(layer: Any, q: torch.Tensor) -> torch.Tensor:
        assert (
            journal[-1] is graph.pieces[len(seen)].graph and layer is graph.pieces[len(seen)].layer
        )
        seen.append(q.clone())
        return q * (1 + len(seen))

    monkeypatch.setattr(worker._runner.step, "run", run)
    tensors, hidden = mixed.replay(flat)
    assert [*(piece.graph for piece in graph.pieces), graph.last] == journal
    assert len(seen) == NUM_LAYERS
    assert all(torch.equal(q, between.q[:num_tokens]) for q in seen)
    assert torch.equal(between.out[:num_tokens], between.q[:num_tokens] * (1 + NUM_LAYERS))
    assert bool((between.out[num_tokens:] == 77).all())
    assert len(tensors.token_ids) == size
    assert torch.equal(hidden, graph.hidden[:num_tokens])


def test_what_was_not_captured_does_not_fit(captured: tuple[Worker, MixedGraphs]) -> None:
    worker, mixed = captured
    for num_tokens in (1, 16, 17):
        flat = padding_step(np.array([num_tokens]), worker.batch.padding_row)
        assert mixed.fits(flat) is (num_tokens <= 16)
    assert not MixedGraphs(worker._runner, worker.batch.padding_row).fits(flat)
