"""What the compiler makes of products of few tokens for Hopper: what they read is on its way at
once, in registers, and the second product's weights before it waits for the first."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: the tests' own interprets kernels.
PROGRAM = """
import sys
import torch
from tests.helpers.compiling import compiled, stack_of
from rackmount_moe.triton_experts.launches import Prepared, vector_launch
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import Plan, Tiling

def packed(form, n, k):
    scales, dtype = (n, torch.bfloat16) if form == "int4" else (n // 128, torch.float32)
    return Packed(
        format="int4_groups" if form == "int4" else "fp8_blocks",
        code=form,
        values=torch.empty((8, k // 128, n, 16 if form == "int4" else 32), dtype=torch.int32),
        rows=n,
        columns=k,
        block_k=128,
        group=128,
        scales=torch.empty((8, scales, k // 128), dtype=dtype),
    )

torch.set_default_device("meta")
form, which, tiling = sys.argv[1], sys.argv[2], Tiling(*map(int, sys.argv[3:]))
layer = Prepared(packed(form, 1536, 2048), packed(form, 2048, 768), ())
ids, weights = torch.empty((1, 8), dtype=torch.int32), torch.empty((1, 8))
x, act = (torch.empty(size, dtype=torch.bfloat16) for size in ((1, 2048), (8, 768)))
plan = Plan(tiling, tiling)
if which == "gate_up":
    kernel, _, arguments = vector_launch(plan, layer, x, ids, weights, act)
else:
    kernel, _, arguments = vector_launch(plan, layer, act, ids, None, x)
made = compiled(kernel, arguments, 90)
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
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, form, which, *map(str, tiling)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    )
    stack, _, text = process.stdout.partition(" ")
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
