"""What is compiled before the first step is what steps launch, by Triton's own account."""

import pytest
from tests.helpers.specializations import find, names_of


@pytest.mark.parametrize(
    ("asked", "kernels"),
    [
        (("experts", "tabulated"), {"vector", "product", "place", "count", "combine"}),
        (("experts", "dense"), {"vector", "product", "place", "count", "combine"}),
        (
            ("experts", "int4_groups with zeros, in another order"),
            {"vector", "product", "place", "count", "combine"},
        ),
        (("router", "qwen3"), {"gate", "route"}),
        (("router", "deepseek-v3"), {"gate", "route"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_steps_launch_what_was_compiled_ahead_and_no_more(
    asked: tuple[str, ...], kernels: set[str]
) -> None:
    """Of tokens from one to thousands, and nothing twice though there are two layers."""
    found = find(*asked)
    assert set(found["launched"]) == set(found["ahead"])
    assert len(set(found["ahead"])) == len(found["ahead"])
    assert names_of(found["launched"]) == kernels
