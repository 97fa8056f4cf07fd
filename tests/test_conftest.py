"""Which lane sees a GPU."""

import pytest
from tests.conftest import asks_for_gpu


@pytest.mark.parametrize("markexpr", ["gpu", "gpu and slow", "slow and gpu", "(gpu) and not slow"])
def test_the_gpu_lane_sees_a_gpu(markexpr: str) -> None:
    assert asks_for_gpu(markexpr)


@pytest.mark.parametrize(
    "markexpr", ["", "slow", "not gpu", "not  gpu", "not slow and not gpu", "slow and not gpu"]
)
def test_every_other_lane_is_of_the_cpu(markexpr: str) -> None:
    assert not asks_for_gpu(markexpr)
