"""What the compiler makes of products of few rows for Hopper: packed words go through shared
memory, and no values do, or their speed is gone. Of one row, words wait for x in registers."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def compile_for_hopper(*arguments: str | int) -> str:
    """What `tests.helpers.compiling` prints."""
    return subprocess.run(
        [sys.executable, "-m", "tests.helpers.compiling", *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("form", "group", "tokens", "block_n", "warps"),
    [
        ("int4", 128, 8, 128, 2),
        ("int4", 128, 16, 64, 2),
        ("int4", 128, 16, 128, 4),
        ("int4", 128, 64, 128, 8),
        ("int4", 128, 128, 256, 8),
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
    text = compile_for_hopper("few", form, group, tokens, block_n, warps)
    wide = warps >= 4
    instruction = r"wgmma\.mma_async.*" if wide else r"mma\.sync.*"
    products = [found.start() for found in re.finditer(instruction, text)]
    begin = text.rindex("cp.async.wait_group", 0, products[0])
    loop = text[begin : text.index("\n", products[-1])]
    rows, columns = (64 * warps // 4, tokens) if wide else (16 * warps, 8)
    # In four bits each warp of mma.sync also sums the tokens, for all of its rows at once.
    sums = 0 if wide or form != "int4" else 1
    assert len(products) == (block_n // rows + sums) * (tokens // columns) * (128 // 16)
    in_registers = re.findall(r"wgmma\.mma_async\S+ \{[^}]+\}, \{[^}]+\}, %rd", loop)
    assert len(in_registers) == (len(products) if wide else 0)
    assert "ldmatrix" in loop and "stmatrix" not in loop
    if form == "int4" and not wide:  # words are not copied once more, and rows not clamped
        assert not re.search(r"\b(xor|min)\.", loop)
    # Of a block no MMA is under way any more when the next one's values are made.
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", text)) <= {"0"}
    # What goes there in 16 bits are a tile's zeros.
    assert set(re.findall(r"st\.shared\S*", loop)) <= {"st.shared.b16"}
    assert len(re.findall(r"st\.shared\.b16", loop)) <= 1


@pytest.mark.parametrize(
    ("form", "group", "block_n", "step", "warps"),
    [
        ("int4", 128, 16, 32, 4),
        ("int4", 128, 4, 32, 2),
        ("int4", 128, 8, 16, 2),
        ("int4", 0, 16, 32, 4),
        ("int8", 128, 8, 32, 4),
        ("int8", 0, 4, 8, 2),
        ("fp8", 0, 8, 32, 8),
        ("fp8", 128, 4, 16, 4),
    ],
)
def test_words_of_one_row_are_in_registers_before_x_may_be_read(
    form: str, group: int, block_n: int, step: int, warps: int
) -> None:
    stack, text = compile_for_hopper("row", form, group, block_n, step, warps).split("\n", 1)
    assert int(stack) == 0
    before, after = text.split("griddepcontrol.wait", 1)
    words = 128 // (8 if form == "int4" else 4)
    loads = block_n * step * words // 4 // (32 * warps)
    wide = r"ld\.global\S*\.v4\.b32"
    assert len(re.findall(wide, before)) == loads
    loop = re.search(r"(\$L__BB\S+):(?:.*\n)*?.*bra\S*\s+\1;", after)
    assert (loop is None) == (step * 128 >= 4096)
    # What a loop has in shared memory its threads would wait for in every round.
    assert loop is None or not re.search(r"bar\.sync|shared", loop[0])


@pytest.mark.parametrize("zeros", [0, 1], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(("group", "epilogue"), [(128, 0), (256, 0), (128, 1), (128, 2)])
def test_held_tokens_and_words_go_from_memory_to_the_mma(
    group: int, epilogue: int, zeros: int
) -> None:
    stack, text = compile_for_hopper("held", "int4", group, epilogue, zeros).split("\n", 1)
    assert int(stack) == 0
    before, after = text.split("ACQBULK", 1)
    wide = "LDG.E.128"
    words = 4  # a thread's loads of a tile: two steps of two runs of eight rows
    assert before.count(wide) == words  # a tile's are there before x may be read
    begin = after.index("\n.L_x_")
    start, loop = after[:begin], after[begin:]
    assert start.count(wide) == 8 and start.count("HMMA") == 16
    assert "SHFL" not in start and "LDS" not in start  # tokens are where the MMA wants them
    assert loop.count(wide) == words and loop.count("HMMA") == 16
    # The next tile's words are called before this one's are multiplied.
    assert loop.rindex(wide) < loop.index("HMMA")
    # Sums alone go through shared memory.
    assert loop.index("STS") > loop.rindex("HMMA") and loop.count("BAR.SYNC") == 2


@pytest.mark.parametrize(("form", "group"), [("int4", 128), ("fp8", 0)])
def test_a_weight_that_becomes_a_matrix_is_read_before_the_kernel_before_ends(
    form: str, group: int
) -> None:
    before, after = compile_for_hopper("many", form, group).split("griddepcontrol.wait", 1)
    assert "ld.global" in before and "ld.global" not in after
    assert "st.global" in after and "st.global" not in before
