"""What a profile measures, on a CPU that counts as a GPU: its memory is what a test says."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import tiny_engine

from rackmount import Engine
from rackmount.execution import profile
from rackmount.rack import Rack

FREE = 1 << 40
FIRST, EACH = 1 << 30, 1000
"""Bytes that the largest graph takes, and each token or request of others."""


class Card:
    """A GPU's memory, as PyTorch tells it."""

    def __init__(self) -> None:
        self.taken = 0
        self.captured: dict[str, list[list[int]]] = {}

    def graphs(self, kind: str) -> Any:
        """In the place of `DecodeGraphs` and `MixedGraphs`."""
        tried = self.captured.setdefault(kind, [])

        class Graphs:
            def __init__(self, *given: Any) -> None:
                pass

            def capture(self, sizes: Iterable[int]) -> None:
                tried.append(list(sizes))
                for size in tried[-1]:
                    card.taken += FIRST if sum(map(len, tried)) == 1 else size * EACH

        card = self
        return Graphs


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, stand_in in {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "synchronize": lambda: None,
        "memory_reserved": lambda: 100,
        "max_memory_reserved": lambda: 700,
        "mem_get_info": lambda: (FREE - card.taken, FREE),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(profile, "DecodeGraphs", card.graphs("decode"))
    monkeypatch.setattr(profile, "MixedGraphs", card.graphs("mixed"))
    return card


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3")
    with tiny_engine(folder, max_num_seqs=9, max_num_batched_tokens=40) as engine:
        yield engine


def measured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[int]]]:
    """The profile, and the lengths of the queries of each step that it ran."""
    worker = engine.core.executor._program._worker
    runner, steps = worker._runner, []
    hidden = runner.hidden

    def watch(flat: Any, *, of_all: bool) -> Any:
        assert of_all
        steps.append((flat.query_start_loc[1:] - flat.query_start_loc[:-1]).tolist())
        return hidden(flat, of_all=of_all)

    monkeypatch.setattr(runner, "hidden", watch)
    with torch.inference_mode():
        found = profile.profile(runner, worker._sampler, worker.batch.padding_row, 7)
    return found, steps


def test_the_largest_steps_are_run(
    card: Card, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token budget shared by all requests, and one long prompt beside those who decode."""
    logprobs: list[int] = []
    ops = engine.core.executor._program._worker._runner.ops
    taken = ops.logprobs

    def count(logits: torch.Tensor, *more: Any) -> Any:
        logprobs.append(len(logits))
        return taken(logits, *more)

    monkeypatch.setattr(ops, "logprobs", count)
    found, steps = measured(engine, monkeypatch)
    assert found.activations == 600
    shared, mixed, again = steps
    assert shared == again and len(shared) == 9 and sum(shared) == 40
    assert max(shared) - min(shared) <= 1
    assert mixed == [*[1] * 8, 32]
    assert logprobs == [7, 9] * 3, "a chunk of a prompt, and the tokens that were sampled"


def test_two_sizes_tell_what_all_graphs_take(
    card: Card, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rack, "eager_because", "")
    decode, mixed = engine.rack.decode_sizes, engine.rack.mixed_sizes
    assert decode == [1, 2, 4, 8, 9] and mixed == [16, 32, 40]
    found, _ = measured(engine, monkeypatch)
    assert card.captured == {"decode": [[9], [8]], "mixed": [[40], [32]]}
    assert found.graphs == FIRST + 8 * EACH * 4 + FIRST + 32 * EACH * 2


def test_one_size_is_captured_once_and_none_not_at_all(
    card: Card, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = measured(engine, monkeypatch)
    assert found.graphs == 0
    assert card.captured == {"decode": [[], []], "mixed": [[], []]}
    card.captured["decode"].clear()
    monkeypatch.setattr(Rack, "decode_sizes", [9])
    found, _ = measured(engine, monkeypatch)
    assert card.captured["decode"] == [[9], []] and found.graphs == FIRST
