"""What the compiler makes of products of few rows for Hopper: packed words go through shared
memory, and no values do, or their speed is gone."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "group", "tokens", "block_n", "warps"),
    [
        ("int4", 128, 16, 64, 2),
        ("int4", 128, 16, 128, 4),
        ("int4", 128, 64, 256, 16),
        ("int4", 0, 16, 64, 4),
        ("int8", 128, 16, 64, 2),
        ("int8", 0, 64, 64, 4),
        ("fp8", 0, 16, 64, 2),
        ("fp8", 0, 16, 64, 4),
        ("fp8", 0, 64, 128, 8),
    ],
)
def test_weights_reach_the_mma_in_registers(
    form: str, group: int, tokens: int, block_n: int, warps: int
) -> None:
    arguments = (form, *map(str, (group, tokens, block_n, warps)))
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compiling", *arguments],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    )
    text = process.stdout
    wide = warps >= 4
    instruction = r"wgmma\.mma_async.*" if wide else r"mma\.sync.*"
    products = [found.start() for found in re.finditer(instruction, text)]
    begin = text.rindex("cp.async.wait_group", 0, products[0])
    loop = text[begin : text.index("\n", products[-1])]
    rows, columns = (64 * warps // 4, tokens) if wide else (16 * warps, 8)
    assert len(products) == (block_n // rows) * (tokens // columns) * (128 // 16)
    in_registers = re.findall(r"wgmma\.mma_async\S+ \{[^}]+\}, \{[^}]+\}, %rd", loop)
    assert len(in_registers) == (len(products) if wide else 0)
    assert "ldmatrix" in loop and "stmatrix" not in loop
    # What goes there in 16 bits are a tile's zeros.
    assert set(re.findall(r"st\.shared\S*", loop)) <= {"st.shared.b16"}
    assert len(re.findall(r"st\.shared\.b16", loop)) <= 1
