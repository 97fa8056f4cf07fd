"""What is compiled before the first step is what steps launch, by Triton's own account."""

import pytest
from tests.helpers.specializations import Found, find, names_of

EXPERTS, ROUTER = {"vector", "product", "place", "count", "combine"}, {"gate", "route"}
KERNELS = {
    "experts tabulated": EXPERTS,
    "experts dense": EXPERTS,
    "experts int4_groups with zeros, in another order": EXPERTS,
    "router qwen3": ROUTER,
    "router deepseek-v3": ROUTER,
}
"""Case -> what it launches."""


@pytest.fixture(scope="module")
def results() -> dict[str, Found]:
    return find("specializations", KERNELS)


@pytest.mark.parametrize("case", KERNELS)
def test_steps_launch_what_was_compiled_ahead_and_no_more(
    case: str, results: dict[str, Found]
) -> None:
    """Of tokens from one to thousands, and nothing twice though there are two layers."""
    found = results[case]
    assert set(found["launched"]) == set(found["ahead"])
    assert len(set(found["ahead"])) == len(found["ahead"])
    assert names_of(found["launched"]) == KERNELS[case]
