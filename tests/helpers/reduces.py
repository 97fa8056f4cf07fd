"""Whether the compiler can add up what kernels ask it to. Run as a program, in a process of its
own: the tests' own interprets kernels.

Triton 3.6 adds along an axis by steps of 2^i lanes, from the first lane bit on that the axis has.
Where its lane bits do not follow one another, as after a reshape of two axes to one, it silently
adds up what belongs elsewhere.

Usage: python -m tests.helpers.reduces FORMAT...: prints the reductions of `vector_kernel` that come
out wrong, for compute capability 9.0, by the rule's plans and those of the GPU's tests.
"""

import re
import sys
from collections.abc import Iterator

import torch
from tests.helpers.compiling import compiled

from rackmount_moe.triton_experts.launches import Prepared, vector_launch
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import Plan, Tiling
from rackmount_moe.triton_experts.tuning import rule

REDUCE = re.compile(
    r'"tt\.reduce"\(.*?\) <\{axis = (\d+) : i32\}> \(\{.*?\n\s*\}\) : \((tensor<.*?>)[,)] ?', re.S
)
SIZES = ((320, 136), (2048, 768), (4096, 14336))
"""Hidden size and width."""
PLANS = (
    Plan(Tiling(16, 256, 2, 4), Tiling(8, 128, 2, 4)),
    Plan(Tiling(4, 512, 2, 2), Tiling(4, 128, 2, 8)),
    Plan(Tiling(32, 128, 2, 4), Tiling(16, 256, 2, 8)),
)


def wrong_reduces(ir: str) -> list[str]:
    """Types, in a kernel's TTGIR, of what is reduced along lanes that do not follow one another."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", ir, re.M))
    found = []
    for axis, given in REDUCE.findall(ir):
        layout = re.fullmatch(r"tensor<[\dx]+\w+, (#.*)>", given)
        assert layout, given
        bits = [i for i, lane in enumerate(lanes_of(layout[1], layouts)) if lane[int(axis)]]
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append(f"{given} along {axis}")
    return found


def lanes_of(name: str, layouts: dict[str, str]) -> list[list[int]]:
    """How far each bit of a lane's number goes along each axis. Of layouts that are not linear
    none: those of an axis follow one another."""
    if cut := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", name):
        lanes = lanes_of(cut[2], layouts)
        return [lane[: int(cut[1])] + lane[int(cut[1]) + 1 :] for lane in lanes]
    linear = re.search(r"#ttg\.linear<.*lane = (\[.*?\]), warp", layouts.get(name, name))
    if linear is None:
        return []
    text = linear[1]
    return [[int(step) for step in lane.split(",")] for lane in re.findall(r"\[([\d, ]+)\]", text)]


def packed(form: str, rows: int, columns: int) -> Packed:
    blocks, words = -(-columns // 128), {"int4_groups": 16}.get(form, 32)
    shape = {
        "int4_groups": (rows, blocks),
        "fp8_blocks": (-(-rows // 128), blocks),
        "fp8_rows": (rows, 1),
    }
    dense = form == "dense"
    return Packed(
        format=form,
        code={"dense": "dense", "int4_groups": "int4"}.get(form, "fp8"),
        values=torch.empty(4, rows, columns, dtype=torch.bfloat16)
        if dense
        else torch.empty(4, blocks, rows, words, dtype=torch.int32),
        rows=rows,
        columns=columns,
        block_k=0 if dense else 128,
        group=128 if form in ("int4_groups", "fp8_blocks") else 0,
        scales=None if dense else torch.empty(4, *shape[form]),
    )


def checked(form: str) -> Iterator[str]:
    for (hidden, width), top_k in ((size, top_k) for size in SIZES for top_k in (1, 2, 4, 8)):
        layer = Prepared(packed(form, 2 * width, hidden), packed(form, hidden, width), ())
        ids, weights = torch.empty(1, top_k, dtype=torch.int32), torch.empty(1, top_k)
        x, act = (torch.empty(n, dtype=torch.bfloat16) for n in ((1, hidden), (top_k, width)))
        plans = PLANS if hidden == SIZES[0][0] else (rule(layer.gate_up, layer.down, 1),)
        for plan in plans:
            launches = [vector_launch(plan, layer, act, ids, None, x)]
            if top_k == 1:
                launches.append(vector_launch(plan, layer, x, ids, weights, act))
            for kernel, _, arguments in launches:
                made = compiled(kernel, arguments | {"CONVERTS": True}, 90)
                for wrong in wrong_reduces(made.asm["ttgir"]):
                    yield f"{form}, {hidden} x {width}, top {top_k}, {plan}: {wrong}"


if __name__ == "__main__":
    torch.set_default_device("meta")
    for each in sys.argv[1:]:
        print(*checked(each), sep="\n", end="")
