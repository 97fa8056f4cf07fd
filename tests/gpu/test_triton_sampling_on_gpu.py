"""Triton's `sample`, compiled, against its definition on the same GPU."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.sampling import state_of
from torch import Tensor

from rackmount.sampling.params import SamplingParams
from rackmount_backends.triton_ops.sampling import sample
from rackmount_registry import ops
from rackmount_registry.sampling import SamplingState

pytestmark = pytest.mark.gpu

V = 151936
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"min_p": 0.1, "temperature": 1.5},
    {"temperature": 1e-5},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 50, "temperature": 3.0},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.5, "min_p": 0.01, "temperature": 0.6},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 20, "top_p": 0.5, "temperature": 5.0},
    {"top_k": 5000, "top_p": 0.7},
]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def mixed(num_rows: int, vocab_size: int) -> SamplingState:
    params = [SamplingParams(**KINDS[row % len(KINDS)]) for row in range(num_rows)]
    return state_of(params, vocab_size, "cuda")


def normal(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(num_rows, vocab_size, device="cuda", generator=generator) * scale


def integers(num_rows: int, first: int = 0) -> Tensor:
    return torch.arange(num_rows, dtype=torch.int32, device="cuda") + first


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(256, V), (14, 128256), (70, 50257), (28, 262144), (28, 97)]
)
def test_tokens_are_those_of_the_definition(
    num_rows: int, vocab_size: int, dtype: torch.dtype, scale: float
) -> None:
    logits = normal(num_rows, vocab_size, scale).to(dtype)
    arguments = integers(num_rows), integers(num_rows, 7), mixed(num_rows, vocab_size)
    expected = ops.sample(logits.clone(), *arguments)
    assert sample(logits, *arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_row_alone_gives_the_token_of_the_definition(kind: int) -> None:
    state = state_of([SamplingParams(**KINDS[kind])], V, "cuda")
    for seed in range(10):
        logits = normal(1, V, 2.0, seed).bfloat16()
        expected = ops.sample(logits.clone(), integers(1), integers(1, seed), state)
        assert torch.equal(sample(logits, integers(1), integers(1, seed), state), expected)


def test_rows_without_a_token_to_give_say_so() -> None:
    size = len(KINDS)
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        logits = normal(size, V, 2.0)
        logits[::2, 77777 if bad != -math.inf else slice(None)] = bad
        arguments = integers(size), integers(size), mixed(size, V)
        expected = ops.sample(logits.clone(), *arguments)
        assert expected[::2].eq(-1).all()
        assert sample(logits, *arguments).tolist() == expected.tolist()


def test_a_graph_follows_logits_rows_positions_and_state() -> None:
    num_rows = 16
    logits = normal(num_rows, V, 2.0).bfloat16()
    rows, positions, state = integers(num_rows), integers(num_rows), mixed(3 * num_rows, V)
    sample(logits, rows, positions, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, rows, positions, state)
    for step in range(5):
        logits.copy_(normal(num_rows, V, 2.0, step))
        rows.copy_(integers(num_rows, step * 5))
        positions.add_(1)
        state.numbers[:-1].copy_(state.numbers[:-1].roll(1, 0))
        state.draws[:-1].copy_(state.draws[:-1].roll(1))
        state.seeds.add_(step)
        graph.replay()
        expected = ops.sample(logits.clone(), rows, positions, state)
        assert tokens.tolist() == expected.tolist()
