"""Slots sorted by expert in the interpreter, against sorting them in Python."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import mend_loops
from torch import Tensor

from rackmount_moe.triton_experts import align as module
from rackmount_moe.triton_experts.align import align


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 64 slots are looked through by several programs; what nobody writes is -7."""
    mend_loops(monkeypatch)
    monkeypatch.setattr(module, "SEGMENTS", (32, 64))
    monkeypatch.setattr(module.torch, "empty", lambda *a, **k: torch.full(*a, -7, **k))


def assert_sorted(ids: Tensor, num_experts: int, block_m: int) -> None:
    """Every expert's slots in whole blocks of its own, rising, padded with the number of slots."""
    blocks = align(ids, num_experts, block_m)
    count, flat = int(blocks.count), ids.flatten().tolist()
    wanted_experts, wanted_slots = [], []
    for expert in range(num_experts):
        slots = [slot for slot, each in enumerate(flat) if each == expert]
        for first in range(0, len(slots), block_m):
            block = slots[first : first + block_m]
            wanted_experts.append(expert)
            wanted_slots.append(block + [len(flat)] * (block_m - len(block)))
    assert count == len(wanted_experts) <= len(blocks.experts)
    assert blocks.experts[:count].tolist() == wanted_experts
    assert blocks.slots[:count].tolist() == wanted_slots


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    num_experts=st.sampled_from((1, 3, 8)),
    tokens=st.integers(1, 70),
    top_k=st.integers(1, 3),
    block_m=st.sampled_from((2, 4, 16)),
    seed=st.integers(0, 99),
)
def test_slots_stand_in_blocks_of_their_expert(
    num_experts: int, tokens: int, top_k: int, block_m: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = (tokens, top_k)
    ids = torch.randint(-1, num_experts, size, generator=generator, dtype=torch.int32)
    assert_sorted(ids, num_experts, block_m)


@pytest.mark.parametrize("expert", [-1, 0, 4])
def test_all_slots_may_be_of_one_expert_or_of_none(expert: int) -> None:
    assert_sorted(torch.full((33, 2), expert, dtype=torch.int32), 5, 16)


def test_an_expert_may_fill_more_blocks_than_one_store_names() -> None:
    assert_sorted(torch.full((70, 1), 1, dtype=torch.int32), 2, 2)


def test_there_may_be_more_segments_than_are_added_at_once() -> None:
    ids = torch.randint(-1, 3, (300, 2), generator=torch.Generator().manual_seed(0))
    assert module.segments_of(ids.numel())[0] > module.SEGMENTS_AT_ONCE.value
    assert_sorted(ids.int(), 3, 16)
