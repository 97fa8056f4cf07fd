"""What the compiler makes of products of few rows for Hopper: packed words go through shared memory,
and no values do, or their speed is gone."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "group", "block_n", "warps"),
    [
        ("int4", 128, 64, 4),
        ("int4", 128, 128, 4),
        ("int4", 128, 256, 8),
        ("int4", 0, 128, 4),
        ("int8", 128, 64, 4),
        ("int8", 0, 64, 4),
        ("fp8", 0, 64, 4),
        ("fp8", 0, 128, 8),
    ],
)
def test_weights_reach_the_mma_in_registers(
    form: str, group: int, block_n: int, warps: int
) -> None:
    arguments = (form, str(group), str(block_n), str(warps))
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compiling", *arguments],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    )
    text = process.stdout
    products = [found.start() for found in re.finditer(r"wgmma\.mma_async.*", text)]
    begin = text.rindex("cp.async.wait_group", 0, products[0])
    loop = text[begin : text.index("\n", products[-1])]
    assert len(products) == (block_n // 64) * (128 // 16) // (warps // 4)
    in_registers = re.findall(r"wgmma\.mma_async\S+ \{[^}]+\}, \{[^}]+\}, %rd", loop)
    assert len(in_registers) == len(products)
    assert "ldmatrix" in loop and "stmatrix" not in loop
    assert set(re.findall(r"st\.shared\S*", loop)) <= {"st.shared.b8"}  # a tile's zeros
