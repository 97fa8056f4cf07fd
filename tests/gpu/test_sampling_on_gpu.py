"""The sampler on a GPU: the CPU's tokens, and no wait of the host."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.sampling import sample

from rackmount.device import upload
from rackmount.sampling import sampler as module
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_backends.triton_ops.op_set import TRITON_OPS

pytestmark = pytest.mark.gpu

V = 2500
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 40, "min_p": 0.05},
    {"top_k": 700, "top_p": 0.8, "temperature": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {5: 8.0, 6: -3.0}, "logprobs": 3},
    {"allowed_token_ids": list(range(0, 2500, 7)), "top_p": 0.9},
    {"min_tokens": 3, "temperature": 0.5, "logprobs": 0},
]
SIZE = len(KINDS)
ROWS = np.arange(SIZE)
HISTORY = np.zeros((SIZE, 64), int)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Raises where torch waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def admitted(device: str) -> SamplingTable:
    table = SamplingTable(SIZE, V, torch.device(device))
    for row, given in enumerate(KINDS):
        table.admit(
            row,
            SamplingParams(**given),
            seed=row,
            prompt_token_ids=[row, 3],
            bad_words_ids=[[5, 9], [11]],
            stop_ids=range(0, V, 2),
        )
    return table


def normal(step: int) -> torch.Tensor:
    return torch.randn(SIZE, V, generator=torch.Generator().manual_seed(step)) * 2


def test_the_tokens_are_those_of_the_cpu() -> None:
    found: dict[str, list[list[int]]] = {"cpu": [], "cuda": []}
    for device, tokens in found.items():
        table = admitted(device)
        for step in range(20):
            logits = normal(step).to(device)
            positions = np.full(SIZE, step + 2)
            tokens.append(sample(table, logits, ROWS, positions, HISTORY).token_ids.tolist())
    assert found["cuda"] == found["cpu"]


@pytest.mark.usefixtures("no_waiting")
def test_a_step_never_waits_for_the_gpu() -> None:
    table = admitted("cuda")
    sampler = Sampler(table, TRITON_OPS)
    for step in range(3):
        table.release(step)
        table.admit(step, SamplingParams(**KINDS[-step]), seed=step, prompt_token_ids=[1, 2])
        logits = torch.empty(SIZE, V, device="cuda").normal_()
        positions = np.full(SIZE, step + 2)
        sampler.prepare(ROWS, positions, HISTORY)
        where = upload(ROWS, table.device), upload(positions, table.device)
        token_ids = sampler.draw_processed(logits, *where)
        sampler.logprobs(logits, ROWS, token_ids)


@pytest.mark.parametrize("block", [2, 2**22])
def test_a_captured_sampling_is_the_eager_one(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go between its replays, masks and counts change, and it is padded; logits are
    bfloat16, some of them among the smallest numbers, zeros of both signs, infinite or NaN."""
    monkeypatch.setattr(module, "BLOCK_LOGITS", block * V)
    tables = admitted("cuda"), admitted("cuda")
    eager, captured = (Sampler(table, TRITON_OPS) for table in tables)
    device = torch.device("cuda")
    rows = upload(np.append(ROWS, [SIZE, SIZE]).astype(np.int32), device)
    positions = torch.zeros(SIZE + 2, dtype=torch.int32, device=device)
    logits = torch.zeros(SIZE + 2, V, dtype=torch.bfloat16, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        processed = captured.process(logits, rows)
        return processed, captured.draw_processed(logits, rows, positions)

    captured.prepare(ROWS, np.full(SIZE, 2), HISTORY)
    eager.prepare(ROWS, np.full(SIZE, 2), HISTORY)
    step()
    eager.draw_processed(logits, rows, positions)  # it counts, as the run before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        processed, token_ids = step()
    tokens = []
    for number in range(12):
        at = np.full(SIZE, number + 2)
        for table in tables:
            row = number % SIZE
            table.release(row)
            given = SamplingParams(**KINDS[(row + number) % SIZE])
            table.admit(row, given, seed=number, prompt_token_ids=[5], bad_words_ids=[[number]])
        logits.normal_().mul_(2)
        odd = [0.0, -0.0, 1e-39, -1e-39, float("-inf")]
        logits[:, 30:35] = torch.tensor(odd, dtype=torch.bfloat16).to(device)
        logits[number % SIZE, 50] = torch.nan
        positions[:SIZE] = upload(at.astype(np.int32), device)
        for sampler in (eager, captured):
            sampler.prepare(ROWS, at, HISTORY)
        expected = eager.process(logits, rows)
        graph.replay()
        assert torch.equal(processed.view(torch.int32), expected.view(torch.int32))
        padding = logits[SIZE:].float()
        assert torch.equal(processed[SIZE:].view(torch.int32), padding.view(torch.int32))
        assert torch.equal(token_ids, eager.draw_processed(logits, rows, positions))
        tokens.append(token_ids.tolist())
    found = {token for step in tokens for token in step}
    assert -1 in found and len(found) > 40


def test_an_upload_is_of_the_array_as_it_was() -> None:
    array = np.arange(1000)
    tensor = upload(array, torch.device("cuda"))
    array[:] = 0
    assert tensor.tolist() == list(range(1000))
