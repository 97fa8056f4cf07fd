"""The sampler on a GPU: the CPU's tokens, and no wait of the host."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.sampling import sample

from rackmount.device import upload
from rackmount.sampling.params import SamplingParams
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_backends.triton_ops.sampling import sample as triton_sample
from rackmount_registry.ops import reference_ops

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
    ops = reference_ops()
    sampler = Sampler(table, ops)
    for step in range(3):
        table.release(step)
        table.admit(step, SamplingParams(**KINDS[-step]), seed=step, prompt_token_ids=[1, 2])
        table.flush()
        logits = torch.empty(SIZE, V, device="cuda").normal_()
        positions = np.full(SIZE, step + 2)
        logits = sampler.process(logits, ROWS, positions, HISTORY)
        where = upload(ROWS, table.device), upload(positions, table.device)
        sampler.finish(triton_sample(logits, *where, table.state))


def test_an_upload_is_of_the_array_as_it_was() -> None:
    array = np.arange(1000)
    tensor = upload(array, torch.device("cuda"))
    array[:] = 0
    assert tensor.tolist() == list(range(1000))
