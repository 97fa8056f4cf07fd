"""Orderings: right, and of equals the lowest index first."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rackmount_registry.sampling.order import first_max, largest

VALUES = st.sampled_from([-math.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.5, math.inf])


@given(
    st.lists(st.lists(VALUES, min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 7)
)
def test_the_largest_come_in_order_and_equals_by_index(rows: list[list[float]], k: int) -> None:
    expected = [[i for _, i in sorted((-x, i) for i, x in enumerate(row))][:k] for row in rows]
    values = torch.tensor(rows)
    assert largest(values, k).tolist() == expected
    assert first_max(values).tolist() == [order[0] for order in expected]


def test_narrow_and_whole_orders_agree_on_a_large_row() -> None:
    values = torch.randn(2, 30000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    whole = largest(values, 30000)
    assert torch.equal(values.gather(1, whole), values.sort(-1, descending=True).values)
    for k in (1, 50, 29999):
        assert torch.equal(largest(values, k), whole[:, :k])


def test_a_nan_counts_as_the_largest() -> None:
    values = torch.tensor([[1.0, 3.0, 2.0], [1.0, math.nan, 2.0]])
    assert first_max(values).tolist() == [1, 1]
