"""The search for plans on a GPU: what it finds is right, and found again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu.test_experts_on_gpu import check, on_cuda, on_gpu
from tests.helpers.experts import expert_bundle, expert_tokens

from rackmount_moe.options import TritonExpertsOptions
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.table import Table

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 512, 256, 4


@pytest.mark.parametrize("name", ["dense", "int4_groups"])
def test_plans_that_were_found_are_used_and_right(name: str, tmp_path: Path) -> None:
    layer = expert_bundle(name, NUM_EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
    counts, file, told = (1, 16, 64), tmp_path / "own.json", list[str]()
    inputs = {
        count: [
            on_gpu(expert_tokens(count, NUM_EXPERTS, HIDDEN, TOP_K, torch.bfloat16))
            for _ in range(4)
        ]
        for count in counts
    }
    TritonExperts().tune([on_cuda(layer)], inputs, file, seconds=30, say=told.append)
    (row,) = Table.read(file).shapes.values()
    assert set(row) == set(counts)
    assert not any("nothing runs" in line for line in told)
    kernel = TritonExperts(options=TritonExpertsOptions(tuned=str(file)))
    prepared = kernel.prepare(on_cuda(layer))
    assert [prepared.plans[index] for index in (0, 4, 6)] == [row[count] for count in counts]
    for count in (1, 9, 16, 33, 64):
        check(prepared, layer, count, torch.bfloat16)


BROKEN = """
import torch
from rackmount_moe.triton_experts.timing import Timed

timed, values = Timed([], {}), torch.zeros(4, device="cuda")
try:
    torch.empty(1 << 45, device="cuda")
except torch.cuda.OutOfMemoryError:
    timed.check_context()
print("survived")
values[torch.tensor([1 << 20], device="cuda")]
try:
    timed.check_context()
except RuntimeError:
    print("told")
try:
    timed.check_context()
except RuntimeError:
    print("told again")
"""


def test_a_broken_context_is_told_from_an_error_that_it_survives() -> None:
    """In a process of its own: nothing runs there after it."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", BROKEN], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:3] == ["survived", "told", "told again"], done.stderr
