"""The sampler against a slow one, written from the definition in float64, a row at a time."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from tests.helpers.sampling import sample

from rackmount.sampling.params import SamplingParams
from rackmount.sampling.table import SamplingTable
from rackmount_registry.sampling.random import random_bits, row_keys

INF = math.inf
V = 24
STOP_IDS = [1, 2]


@dataclass
class Request:
    params: SamplingParams
    seed: int
    prompt: list[int]
    outputs: list[int]
    bad_words: list[list[int]]
    logits: list[float]


def sample_slowly(request: Request) -> int | None:
    """The token by definition; None where float32's rounding might rightly give another."""
    p, x = request.params, list(request.logits)
    history = request.prompt + request.outputs
    for i in range(V):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            x[i] = -INF
    for *start, last in request.bad_words:
        if start == history[len(history) - len(start) :]:
            x[last] = -INF
    if len(request.outputs) < p.min_tokens:
        for i in STOP_IDS:
            x[i] = -INF
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in set(history):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(request.outputs):
        x[i] -= p.frequency_penalty * request.outputs.count(i) + p.presence_penalty
    order = sorted(range(V), key=lambda i: (-x[i], i))
    top = x[order[0]]
    if top == -INF:
        return -1
    if p.temperature == 0 or p.top_p == 0:
        return order[0]
    x = [(value - top) / p.temperature for value in x]
    if p.top_k > 0:
        order = order[: p.top_k]
    mass = [math.exp(x[i]) for i in order]
    kept = []
    for place, i in enumerate(order):
        share = math.fsum(mass[:place]) / math.fsum(mass)
        if place and p.top_p < 1 and abs(share - p.top_p) < 1e-5:
            return None
        if place and share >= p.top_p < 1:
            break
        if 0 < p.min_p < 1 and abs(math.exp(x[i]) - p.min_p) < 1e-5:
            return None
        if math.exp(x[i]) >= p.min_p:
            kept.append(i)
    seed = torch.from_numpy(np.array([request.seed], np.uint64).view(np.int64))
    keys = row_keys(seed, torch.tensor([len(history)]))
    bits = random_bits(keys, torch.arange(V))[0].tolist()
    race = {i: x[i] - math.log(-math.log1p(-(bits[i] + 0.5) * 2.0**-32)) for i in kept}
    first, *others = sorted(race.values(), reverse=True)
    if others and first - others[0] < 1e-4:
        return None
    return max(race, key=lambda i: race[i])


IDS = st.integers(0, V - 1)
# Numbers whose sums and products are exact in float32: equals stay equals in both.
QUARTERS = st.integers(-24, 24).map(lambda n: n / 4)
PARAMS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.25, 0.7, 1, 1.5, 4]),
        "top_k": st.sampled_from([-1, 0, 2, 3, 10, V - 1, V, V + 1]),
        "top_p": st.sampled_from([0, 0.05, 0.3, 0.6, 0.9, 0.99, 1]),
        "min_p": st.sampled_from([0, 0.01, 0.1, 0.4, 1]),
        "repetition_penalty": st.sampled_from([0.5, 1, 2]),
        "presence_penalty": st.sampled_from([-0.5, 0, 0.25, 2]),
        "frequency_penalty": st.sampled_from([-0.25, 0, 0.5]),
        "min_tokens": st.integers(0, 5),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=9),
        "logit_bias": st.dictionaries(IDS, QUARTERS, max_size=3),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    history = st.integers(0, 5)
    banned = st.one_of(QUARTERS, st.just(-INF))
    return Request(
        params=SamplingParams(**draw(PARAMS)),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt=draw(st.lists(history, min_size=1, max_size=5)),
        outputs=draw(st.lists(history, max_size=6)),
        bad_words=draw(st.lists(st.lists(history, min_size=1, max_size=3), max_size=2)),
        logits=draw(st.lists(banned, min_size=V, max_size=V)),
    )


BATCHES = st.lists(requests(), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@settings(max_examples=120, deadline=None)
@given(batch=BATCHES, dtype=DTYPES)
def test_a_batch_gives_the_tokens_of_the_definition(
    batch: list[Request], dtype: torch.dtype
) -> None:
    check(batch, dtype)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(batch=BATCHES, dtype=DTYPES)
def test_any_batch_of_many_gives_the_tokens_of_the_definition(
    batch: list[Request], dtype: torch.dtype
) -> None:
    check(batch, dtype)


def check(batch: list[Request], dtype: torch.dtype) -> None:
    table = SamplingTable(len(batch), V, torch.device("cpu"))
    token_ids = np.zeros((len(batch), 16), np.int64)
    for row, request in enumerate(batch):
        history = request.prompt + request.outputs
        token_ids[row, : len(history)] = history
        table.admit(
            row,
            request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt,
            output_token_ids=request.outputs,
            bad_words_ids=request.bad_words,
            stop_ids=STOP_IDS,
        )
    logits = torch.tensor([request.logits for request in batch], dtype=dtype)
    positions = np.array([len(request.prompt) + len(request.outputs) for request in batch])
    out = sample(table, logits, np.arange(len(batch)), positions, token_ids)
    expected: list[Any] = [sample_slowly(request) for request in batch]
    assume(any(token is not None for token in expected))
    for row, token in enumerate(expected):
        event("near an edge" if token is None else "compared")
        if token is not None:
            assert out.token_ids[row] == token, (row, batch[row])
