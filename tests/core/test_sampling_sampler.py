"""The sampler: what edge values mean, exactness, and that a row depends on nothing but itself."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.sampling import Sampled, sample
from torch import Tensor

from rackmount.sampling.params import SamplingParams
from rackmount.sampling.table import SamplingTable

NAN, INF = math.nan, math.inf


def draws(logits: list[float] | Tensor, num: int = 400, **given: Any) -> np.ndarray:
    """Tokens [num] of one request's parameters, with as many seeds."""
    logits = torch.as_tensor(logits)
    table = SamplingTable(num, len(logits), torch.device("cpu"))
    params = SamplingParams(**given)
    for row in range(num):
        table.admit(row, params, seed=row, prompt_token_ids=[0])
    rows = np.arange(num)
    out = sample(table, logits.repeat(num, 1), rows, rows * 0 + 1, np.zeros((num, 4), int))
    assert (out.token_ids >= 0).all()
    return out.token_ids.numpy()


LOGITS = [1.0, 3.0, 2.0, 3.0, 2.5]
"""Two equal tokens lead."""
ALL = {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("given", "support"),
    [
        ({}, ALL),
        ({"temperature": 0}, {1}),
        ({"temperature": 9.9e-6}, {1}),
        ({"temperature": 1.1e-5}, {1, 3}),
        ({"temperature": 0, "top_k": 3, "top_p": 0.1, "min_p": 0.5}, {1}),
        ({"temperature": 1e300}, ALL),
        ({"top_k": 0}, ALL),
        ({"top_k": -1}, ALL),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 4}, {1, 2, 3, 4}),
        ({"top_k": 5}, ALL),
        ({"top_k": 6}, ALL),
        ({"top_k": 10**30}, ALL),
        ({"top_p": 1}, ALL),
        ({"top_p": 0}, {1}),
        ({"top_p": 1e-300}, {1}),
        ({"top_p": 0.999999}, ALL),
        ({"min_p": 0}, ALL),
        ({"min_p": 1}, {1, 3}),
        ({"min_p": 1, "top_k": 4}, {1, 3}),
        ({"min_p": 0.7}, {1, 3, 4}),
        ({"min_p": 5e-324}, ALL),
        ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}, ALL),
        ({"logit_bias": {}}, ALL),
        ({"bad_words": []}, ALL),
    ],
)
def test_edge_values_mean_what_the_table_says(given: dict[str, Any], support: set[int]) -> None:
    assert set(draws(LOGITS, **{"temperature": 2.0} | given).tolist()) == support


def probabilities(*p: float) -> list[float]:
    return [math.log(x) for x in p]


def test_of_equals_at_the_edge_the_lowest_ids_are_kept() -> None:
    assert set(draws([0.0, 1.0, 1.0, 1.0, 0.0], top_k=2).tolist()) == {1, 2}
    assert set(draws([0.0] * 8, top_k=3).tolist()) == {0, 1, 2}
    assert set(draws([0.0] * 8, top_p=0.5).tolist()) == {0, 1, 2, 3}
    assert set(draws([-0.0, 0.0, -0.0, 0.0], top_k=2).tolist()) == {0, 1}


def test_top_p_keeps_the_fewest_whose_mass_reaches_it() -> None:
    p = probabilities(0.1, 0.4, 0.2, 0.3)
    assert set(draws(p, top_p=0.39).tolist()) == {1}
    assert set(draws(p, top_p=0.41).tolist()) == {1, 3}
    assert set(draws(p, top_p=0.69).tolist()) == {1, 3}
    assert set(draws(p, top_p=0.71).tolist()) == {1, 2, 3}


def test_temperature_comes_before_top_p() -> None:
    p = probabilities(0.6, 0.3, 0.1)  # at temperature 0.5: 0.78, 0.20, 0.02
    assert set(draws(p, top_p=0.7).tolist()) == {0, 1}
    assert set(draws(p, top_p=0.7, temperature=0.5).tolist()) == {0}


def test_top_p_is_over_what_top_k_left() -> None:
    p = probabilities(0.4, 0.3, 0.2, 0.1)
    assert set(draws(p, top_p=0.5).tolist()) == {0, 1}
    assert set(draws(p, top_p=0.5, top_k=2).tolist()) == {0}


def test_min_p_comes_last() -> None:
    p = probabilities(0.4, 0.3, 0.2, 0.1)  # first would leave 0.44, 0.33, 0.22: 0.42 keeps one
    assert set(draws(p, top_p=0.42, min_p=0.45).tolist()) == {0, 1}


def chi_square_z(counts: np.ndarray, p: np.ndarray) -> float:
    """Standard score of the chi-square statistic, by Wilson and Hilferty's cube root."""
    expected = p * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * (len(p) - 1))
    root: float = (statistic / (len(p) - 1)) ** (1 / 3)
    return (root - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize(
    ("given", "p"),
    [
        ({}, [0.2] * 5),
        ({}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({}, [0.9, 0.09, 0.005, 0.005]),
        ({"temperature": 0.5}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 3}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.75}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.45}, [0.1, 0.4, 0.2, 0.3]),
        ({}, [1 / 300] * 300),
    ],
)
def test_tokens_have_the_frequencies_of_the_distribution(
    given: dict[str, Any], p: list[float]
) -> None:
    num = 20000
    kept = np.array(p) ** (1 / given.get("temperature", 1))
    if given.keys() & {"top_k", "top_p", "min_p"}:
        kept[0] = 0
    counts = np.bincount(draws(probabilities(*p), num, **given), minlength=len(p))
    assert counts[kept == 0].sum() == 0
    kept = kept[kept > 0] / kept.sum()
    assert abs(chi_square_z(counts[counts > 0], kept)) < 4


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.95},
    {"top_k": 40},
    {"top_k": 700, "top_p": 0.8, "temperature": 1.7},
    {"min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3, "temperature": 0.4},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"logit_bias": {5: 8.0, 6: -3.0}, "top_k": 5},
    {"allowed_token_ids": list(range(0, 2500, 7)), "top_p": 0.9},
    {"min_tokens": 3, "temperature": 0.5},
    {"bad_words": ["x"], "temperature": 0.3},
    {"top_k": 1, "frequency_penalty": 2.0},
    {"logprobs": 3},
    {"logprobs": 0, "top_p": 0.5},
    {"logprobs": 7, "temperature": 0},
]
V, STEPS = 2500, 5
Trace = list[tuple[int, list[list[float]]]]


def run_batches(variants: list[int], sizes: list[int], dtype: torch.dtype) -> dict[int, Trace]:
    """Each variant's tokens and logprobs over some steps, sampled in batches of given sizes."""
    table = SamplingTable(len(VARIANTS), V, torch.device("cpu"))
    token_ids = np.zeros((len(VARIANTS), 16), np.int64)
    traces: dict[int, Trace] = {variant: [] for variant in variants}
    for row, variant in enumerate(variants):
        prompt = [variant, 3, 5]
        token_ids[row, :3] = prompt
        table.admit(
            row,
            SamplingParams(**VARIANTS[variant]),
            seed=1000 + variant,
            prompt_token_ids=prompt,
            bad_words_ids=[[5, 9], [11]] if "bad_words" in VARIANTS[variant] else [],
            stop_ids=range(0, V, 2),
        )
    for step in range(STEPS):
        todo = np.arange(len(variants))
        for size in sizes:
            rows, todo = todo[:size], todo[size:]
            batch = [variants[row] for row in rows]
            positions = np.full(len(rows), 3 + step)
            out = sample(table, logits_of(batch, step, dtype), rows, positions, token_ids)
            assert (out.token_ids >= 0).all()
            token_ids[rows, 3 + step] = out.token_ids
            record(out, batch, traces)
        assert not len(todo)
    return traces


def logits_of(variants: list[int], step: int, dtype: torch.dtype) -> Tensor:
    """Of each request and step, whatever the batch; peaked for some, flat for others."""
    rows = [
        torch.randn(V, generator=torch.Generator().manual_seed(100 * variant + step))
        for variant in variants
    ]
    return (torch.stack(rows) * torch.tensor([[1 + v % 4] for v in variants])).to(dtype)


def record(out: Sampled, batch: list[int], traces: dict[int, Trace]) -> None:
    extra: dict[int, list[list[float]]] = {}
    if out.logprobs is not None:
        got = out.logprobs
        for index, at in enumerate(got.rows.tolist()):
            width = 1 + (VARIANTS[batch[at]]["logprobs"])
            extra[at] = [
                got.token_ids[index, :width].tolist(),
                got.logprobs[index, :width].tolist(),
                [float(got.ranks[index])],
            ]
    for at, variant in enumerate(batch):
        traces[variant].append((int(out.token_ids[at]), extra.get(at, [])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_requests_tokens_are_the_same_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    everyone = list(range(len(VARIANTS)))
    together = run_batches(everyone, [len(everyone)], dtype)
    shuffled = np.random.default_rng(0).permutation(everyone).tolist()
    assert run_batches(shuffled, [1, 7, 3, len(everyone) - 11], dtype) == together
    for variant in everyone:
        assert run_batches([variant], [1], dtype)[variant] == together[variant]
    assert len({token for trace in together.values() for token, _ in trace}) > 30


def test_a_row_without_a_token_to_give_says_so_and_disturbs_no_other() -> None:
    rows, size = np.arange(len(VARIANTS)), len(VARIANTS)
    good = torch.randn(size, V, generator=torch.Generator().manual_seed(5))

    def tokens(logits: Tensor) -> Tensor:
        table = SamplingTable(size, V, torch.device("cpu"))
        for row in rows.tolist():
            table.admit(row, SamplingParams(**VARIANTS[row]), seed=row, prompt_token_ids=[0])
        positions = np.ones(size, int)
        return sample(table, logits, rows, positions, np.zeros((size, 4), int)).token_ids

    expected = tokens(good.clone())
    for broken in range(size):
        for row in (
            torch.full((V,), -INF),
            torch.full((V,), NAN),
            torch.full((V,), -NAN),
            torch.where(torch.arange(V) == 1253, NAN, good[broken]),
            torch.where(torch.arange(V) == 7, INF, good[broken]),
        ):
            logits = good.clone()
            logits[broken] = row
            got = tokens(logits)
            assert got[broken] == -1
            others = rows != broken
            assert got[others].tolist() == expected[others].tolist()


def test_a_row_with_every_allowed_id_banned_has_no_token_to_give() -> None:
    table = SamplingTable(2, 4, torch.device("cpu"))
    allowed = SamplingParams(allowed_token_ids=[2, 3], logit_bias={2: 100.0}, top_p=0.5)
    table.admit(0, allowed, seed=0, prompt_token_ids=[0], bad_words_ids=[[2], [3]])
    table.admit(1, allowed, seed=0, prompt_token_ids=[0], bad_words_ids=[[3]])
    rows = np.arange(2)
    out = sample(table, torch.zeros(2, 4), rows, rows * 0 + 1, np.zeros((2, 4), int))
    assert out.token_ids.tolist() == [-1, 2]


def test_extreme_logits_and_temperatures_give_a_token_of_the_support() -> None:
    big = torch.finfo(torch.float32).max
    for temperature in (1e-5, 1.0, 1e300):
        for given in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}):
            tokens = draws([big, -big, -INF, big / 2], 20, temperature=temperature, **given)
            assert set(tokens.tolist()) <= {0, 1, 3}
    assert set(draws([-big, -INF, -big], 50).tolist()) == {0, 2}
    for given in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}):
        tokens = draws([1.0, 0.0, -INF, 2.0], 50, temperature=1e300, **given)
        assert set(tokens.tolist()) == {0, 1, 3}


def test_a_seed_and_a_position_settle_the_token() -> None:
    logits = torch.zeros(1000)
    table = SamplingTable(1, 1000, torch.device("cpu"))

    def token(seed: int, position: int) -> int:
        table.admit(0, SamplingParams(), seed=seed, prompt_token_ids=[0])
        ids = np.zeros((1, 64), int)
        out = sample(table, logits[None].clone(), np.array([0]), np.array([position]), ids)
        return int(out.token_ids)

    cells = [(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(1, 9)]
    tokens = [token(*cell) for cell in cells]
    assert [token(*cell) for cell in cells] == tokens
    assert len(set(tokens)) > 20
