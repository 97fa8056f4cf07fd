"""Products of few rows launch what was compiled while weights loaded, by Triton's own account."""

import pytest
from tests.helpers.specializations import WEIGHTS, Found, find, names_of

CASES = (*WEIGHTS, "one row: int4 groups with zeros", "held: int4 wide groups")


@pytest.fixture(scope="module")
def results() -> dict[str, Found]:
    return find("specializations", [f"linear {case}" for case in (*CASES, "rounded")])


@pytest.mark.parametrize("case", CASES)
def test_products_in_float16_launch_what_was_compiled_ahead_and_no_more(
    case: str, results: dict[str, Found]
) -> None:
    """With every epilogue, with a bias and without, and nothing twice though layers are alike."""
    found = results[f"linear {case}"]
    assert set(found["launched"]) == set(found["ahead"])
    assert len(set(found["ahead"])) == len(found["ahead"])
    other = {"one_row"} if "one row" in case else {"held_tokens"} if "held" in case else set()
    assert names_of(found["launched"]) == {"few_rows"} | other


def test_products_of_rounded_rows_are_compiled_ahead_too(results: dict[str, Found]) -> None:
    found = results["linear rounded"]
    ahead, launched = (
        {each for each in found[when] if names_of([each]) == {"few_rows"}}
        for when in ("ahead", "launched")
    )
    assert launched == ahead
    assert len({"('*i8'" in each for each in ahead}) == 2  # both inputs are there
