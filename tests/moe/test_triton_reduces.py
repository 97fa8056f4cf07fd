"""What kernels of few tokens add up is added right by the compiler."""

import os
import subprocess
import sys

import pytest
from tests.helpers.reduces import wrong_reduces

KERNEL = """
#blocked = #ttg.blocked<{{sizePerThread = [1, 1], threadsPerWarp = [8, 4], order = [1, 0]}}>
#linear = #ttg.linear<{{register = [], lane = [{lanes}], warp = [[0, 2], [0, 4]], block = []}}>
    %total = "tt.reduce"(%sums) <{{axis = 1 : i32}}> ({{
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %c : f32
    }}) : (tensor<8x16xf32, #linear>) -> tensor<8xf32, #ttg.slice<{{dim = 1, parent = #linear}}>>
"""


@pytest.mark.parametrize(
    ("lanes", "count"),
    [
        ("[0, 8], [1, 0], [2, 0], [4, 0], [0, 1]", 1),
        ("[0, 8], [0, 1], [1, 0], [2, 0], [4, 0]", 0),
        ("[1, 0], [2, 0], [4, 0], [0, 8], [0, 1]", 0),
    ],
    ids=["apart", "first", "last"],
)
def test_a_sum_along_lanes_that_lie_apart_is_found(lanes: str, count: int) -> None:
    """The first is what came out of a GPU wrong."""
    assert len(wrong_reduces(KERNEL.format(lanes=lanes))) == count


@pytest.mark.parametrize(
    "form",
    [
        "fp8_blocks",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("dense", "fp8_rows", "int4_groups")),
    ],
)
def test_no_kernel_of_few_tokens_has_one(form: str) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.reduces", form]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not found.stdout
