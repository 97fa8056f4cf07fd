"""What an engine compiles before its first step is what steps launch, by Triton's own account."""

from collections import Counter

import pytest
from tests.helpers.specializations import Found, find

OPERATIONS = Counter(
    build_batch=1,
    choose=2,
    embedding=1,
    logprobs=1,
    norm=4,
    penalize=1,
    rotary_write=2,
    survey=2,
    survey_logprobs=1,
)
"""Kernels of the op set, and of how many kinds: `sample` has those of two dtypes, norms and rotary
embedding have those of few tokens and of many."""
ATTENTION = Counter(_decode=1, _prefill=2)
"""One for any number of requests that decode, and one each for short and long chunks."""
UNUSED = {"linear", "place", "count"}
"""May be compiled for numbers of tokens that no step here has."""
IN_PART = UNUSED | {"gate"}
"""Not all are launched that were compiled: few tokens have their norm with the router."""


LINEAR = {"linear", "silu_mul"}
OTHERS = {
    "llama": LINEAR,
    "llama with an FP8 cache": LINEAR,
    "llama with biases": LINEAR,
    "qwen3-moe": {"linear", "gate", "route", "vector", "product", "combine", "place", "count"},
}
"""Case of the helper -> kernels that it launches beside."""


@pytest.fixture(scope="module")
def results() -> dict[str, Found]:
    return find("first_step", OTHERS)


def kinds_of(found: Found) -> tuple[Counter[str], Counter[str], set[str]]:
    """Names of kernels ahead of the first launch and of those launched, one for each kind, and what
    was launched and not compiled."""
    ahead, launched = Counter(found["ahead"]), set(found["launched"])
    assert set(ahead.values()) == {1}, "nothing is compiled twice"
    names = (Counter(map(name_of, each)) for each in (ahead, launched))
    return *names, launched - set(ahead)


def name_of(kind: str) -> str:
    return kind.split(" ")[0].rpartition(".")[2].removesuffix("_kernel")


@pytest.mark.parametrize("case", OTHERS)
def test_an_engine_launches_what_was_compiled_while_weights_loaded(
    case: str, results: dict[str, Found]
) -> None:
    """At prompts and decodes of one token to a thousand, sampled plainly and processed, with
    log-probabilities and without."""
    (ahead, launched, late), others = kinds_of(results[case]), OTHERS[case]
    assert not late
    expected = OPERATIONS + ATTENTION
    assert Counter({name: launched[name] for name in expected}) == expected
    assert set(launched) | UNUSED & others == set(expected) | others
    assert {name for name in ahead if ahead[name] > launched[name]} <= IN_PART
