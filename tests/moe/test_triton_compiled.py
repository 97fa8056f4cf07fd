"""What the compiler makes of products for Hopper. Of few tokens: what they read is on its way at
once, in registers, and the second product's weights before it waits for the first. Of many: nothing
is written over what an MMA still reads."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import torch
from tests.helpers.compiling import compiled, stack_of
from rackmount_moe.triton_experts.align import Blocks
from rackmount_moe.triton_experts.launches import Prepared, product_launch, vector_launch
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import Plan, Tiling

def packed(form, n, k):
    scales = {"int4": (n, k // 128), "fp8": (n // 128, k // 128), "rows": (n, 1)}[form]
    return Packed(
        format={"int4": "int4_groups", "fp8": "fp8_blocks", "rows": "fp8_rows"}[form],
        code="int4" if form == "int4" else "fp8",
        values=torch.empty((8, k // 128, n, 16 if form == "int4" else 32), dtype=torch.int32),
        rows=n,
        columns=k,
        block_k=128,
        group=0 if form == "rows" else 128,
        scales=torch.empty((8, *scales), dtype=torch.bfloat16 if form == "int4" else None),
    )

torch.set_default_device("meta")
form, which, tiling = sys.argv[1], sys.argv[2], Tiling(*map(int, sys.argv[3:7]))
layer = Prepared(packed(form, 1536, 2048), packed(form, 2048, 768), ())
ids, weights = torch.empty((1, 8), dtype=torch.int32), torch.empty((1, 8))
x, act = (torch.empty(size, dtype=torch.bfloat16) for size in ((1, 2048), (8, 768)))
plan = Plan(tiling, tiling)
if which == "many":
    blocks = Blocks(*(torch.empty(size, dtype=torch.int32) for size in (8, (8, 32), 1)))
    plan = Plan(tiling, tiling, 32)
    kernel, _, arguments = product_launch(plan, layer, x, ids, blocks, weights, act)
elif which == "gate_up":
    kernel, _, arguments = vector_launch(plan, layer, x, ids, weights, act)
else:
    kernel, _, arguments = vector_launch(plan, layer, act, ids, None, x)
capability = int(sys.argv[7])
if "CONVERTS" in arguments:
    arguments["CONVERTS"] = capability >= 89
made = compiled(kernel, arguments, capability)
print(stack_of(made), made.asm["ptx"])
"""


@pytest.mark.parametrize(
    ("form", "which", "tiling"),
    [
        ("int4", "gate_up", (8, 2048, 1, 2)),
        ("fp8", "gate_up", (4, 1024, 2, 2)),
        ("int4", "down", (8, 256, 3, 8)),
        ("fp8", "down", (8, 1024, 1, 8)),
    ],
)
def test_weights_are_asked_for_all_at_once(
    form: str, which: str, tiling: tuple[int, int, int, int]
) -> None:
    stack, _, text = compile_product(form, which, tiling).partition(" ")
    assert stack == "0"
    block_n, block_k, steps, warps = tiling
    choices = 1 if which == "gate_up" else 8
    read = block_n * block_k * steps * choices * (0.5 if form == "int4" else 1)
    weights, inputs = read / 16, block_k * steps * choices / 8
    wide = [found.start() for found in re.finditer(r"ld\.global\S*\.v4\.b32", text)]
    assert len(wide) == (weights + inputs) / (32 * warps)
    wait, multiplied = text.index("griddepcontrol.wait"), text.index("fma.rn.f32")
    assert wide[-1] < multiplied
    if which == "down":
        assert sum(at < wait for at in wide) == weights / (32 * warps)


@pytest.mark.parametrize("form", ["int4", "fp8", "rows"])
@pytest.mark.parametrize("tiling", [(64, 128, 4, 4), (128, 128, 3, 8)])
def test_no_mma_is_under_way_when_the_next_values_are_made(
    form: str, tiling: tuple[int, int, int, int]
) -> None:
    text = compile_product(form, "many", tiling)
    assert "wgmma.mma_async" in text
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", text)) == {"0"}


@pytest.mark.parametrize("capability", [80, 86, 89])
def test_fp8_is_widened_where_no_instruction_does(capability: int) -> None:
    text = compile_product("fp8", "gate_up", (4, 1024, 2, 2), capability)
    assert ("cvt.rn.f16x2.e4m3x2" in text) == (capability >= 89)


def compile_product(
    form: str, which: str, tiling: tuple[int, int, int, int], capability: int = 90
) -> str:
    """Bytes of a thread's stack and PTX, by a process of its own: the tests' interprets kernels."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, form, which, *map(str, tiling), str(capability)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
