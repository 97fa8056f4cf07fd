"""Columns sorted by group: the same weight, in an order in which each group is whole or padded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.packings import Grouped, random_grouped, words_of_rows
from torch import Tensor

from rackmount_quant.awq import awq_format
from rackmount_quant.gptq import Layout, gptq_format
from rackmount_quant.grouped import group_weight, narrow
from rackmount_quant.integers import Integers, integer_format
from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import StoredFormat, Weight


def finish(weight: Grouped, columns: Tensor, *, group: int, symmetric: bool) -> Weight:
    """What a rank with some of the columns makes of a weight whose scales it has all."""
    values = weight.values[:, columns]
    return group_weight(
        words_of_rows(values, 4) if weight.bits == 4 else values.to(torch.uint8),
        weight.scales.float(),
        None if symmetric else weight.zeros.to(torch.uint8),
        bits=weight.bits,
        group=group,
        parts=(len(values),),
        in_features=len(columns),
        groups=weight.groups[columns].int().unsqueeze(0),
    )


LAYOUTS = (
    Layout(bits=bits, group=group, act_order=order, symmetric=symmetric, zeros_less_one=True)
    for bits in (4, 8)
    for group, order, symmetric in ((32, False, True), (32, True, False), (-1, True, True))
)
INTEGERS = (
    Integers(bits=bits, per=per, group=group, symmetric=symmetric, packed=packed)
    for bits in (4, 8)
    for per, group in (("group", 32), ("channel", -1), ("tensor", -1))
    for symmetric in (False, True)
    for packed in (False, True)
)
FORMATS = (
    awq_format(32),
    awq_format(-1, zero_point=False),
    *(gptq_format(layout, 96) for layout in LAYOUTS),
    *(integer_format(kind, (40, 96)) for kind in INTEGERS),
)


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
def test_no_more_bytes_are_foretold_than_are_held(stored: StoredFormat) -> None:
    """Else a model would be refused that fits."""
    assert stored.encode is not None and stored.held_bytes is not None
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.encode(torch.randn(40, 96)).items()
    }
    for name in ("g_idx", "weight_shape"):
        if name in tensors:
            tensors[name] = tensors[name].view(1, -1)
    weight = stored.finish(tensors, (40,), 96)
    held = sum(tensor.nbytes for tensor in weight.tensors.values())
    assert 0.7 * held < stored.held_bytes(40, 96) <= held


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((8, 16, 32, -1)),
    size=st.integers(1, 100),
    cut=st.tuples(st.integers(0, 99), st.integers(1, 100)),
    act_order=st.booleans(),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_columns_of_an_act_ordered_weight_stay_what_they_are(
    bits: int,
    group: int,
    size: int,
    cut: tuple[int, int],
    act_order: bool,
    symmetric: bool,
    seed: int,
) -> None:
    weight = random_grouped(
        3, size, bits=bits, group=group, symmetric=symmetric, act_order=act_order, seed=seed
    )
    start = cut[0] % size
    columns = torch.arange(start, min(size, start + cut[1]))
    finished = finish(weight, columns, group=group, symmetric=symmetric)
    assert finished.format == f"int{bits}_groups"
    assert torch.equal(finished.dequantize(), weight.dense[:, columns])
    order = finished.tensors.get("order")
    if order is not None:
        assert order.dtype == torch.int32
        assert sorted(order[order >= 0].tolist()) == list(range(len(columns)))
        assert order.shape[-1] <= len(columns) + 16 * weight.scales.shape[1]


def test_whole_groups_keep_their_size_and_others_are_padded_to_sixteens() -> None:
    weight = random_grouped(4, 128, group=32, act_order=True)
    whole = finish(weight, torch.arange(128), group=32, symmetric=True)
    assert whole.group == 32 and whole.tensors["scales"].shape == (4, 4)
    assert (whole.tensors["order"] >= 0).all()
    half = finish(weight, torch.arange(64), group=32, symmetric=True)
    assert half.group == 16 and half.tensors["order"].shape[0] % 16 == 0
    assert (half.tensors["order"] == -1).any()
    assert half.tensors["scales"].shape == (4, half.tensors["order"].shape[0] // 16)


def test_groups_in_order_need_no_order() -> None:
    weight = random_grouped(4, 96, group=32)
    tail = finish(weight, torch.arange(32, 96), group=32, symmetric=False)
    assert "order" not in tail.tensors and tail.group == 32
    assert torch.equal(tail.tensors["scales"], weight.scales[:, 1:])


def test_zero_points_in_the_middle_are_left_out() -> None:
    weight = random_grouped(4, 32, group=16, symmetric=True)
    finished = finish(weight, torch.arange(32), group=16, symmetric=False)
    assert "zeros" not in finished.tensors
    assert torch.equal(finished.dequantize(), weight.dense)


def test_each_expert_has_an_order_of_its_own() -> None:
    experts = [random_grouped(3, 64, group=16, act_order=True, seed=seed) for seed in range(4)]
    for columns in (torch.arange(64), torch.arange(24)):
        bundle = group_weight(
            torch.stack([words_of_rows(each.values[:, columns], 4) for each in experts]),
            torch.stack([each.scales.float() for each in experts]),
            torch.stack([each.zeros.to(torch.uint8) for each in experts]),
            bits=4,
            group=16,
            parts=(3,),
            in_features=len(columns),
            groups=torch.stack([each.groups[columns].int().unsqueeze(0) for each in experts]),
        )
        for index, expert in enumerate(experts):
            assert torch.equal(bundle.expert(index).dequantize(), expert.dense[:, columns])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0] * 31 + [2], "from 0 to 1, and are from 0 to 2"),
        ([-1] * 32, "from 0 to 1, and are from -1 to -1"),
    ],
)
def test_groups_that_do_not_exist_are_refused(groups: list[int], message: str) -> None:
    weight = random_grouped(4, 32, group=16, groups=torch.tensor(groups).clamp(0, 1))
    values = words_of_rows(weight.values, 4)
    with pytest.raises(CheckpointError, match=message):
        group_weight(
            values,
            weight.scales.float(),
            None,
            bits=4,
            group=16,
            parts=(4,),
            in_features=32,
            groups=torch.tensor([groups], dtype=torch.int32),
        )


def test_parts_in_different_orders_are_refused() -> None:
    weight = random_grouped(4, 32, group=16)
    with pytest.raises(CheckpointError, match="columns in the same groups, and have not"):
        group_weight(
            words_of_rows(weight.values, 4),
            weight.scales.float(),
            None,
            bits=4,
            group=16,
            parts=(2, 2),
            in_features=32,
            groups=torch.stack((weight.groups, weight.groups.flip(0))).int(),
        )


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_scales_that_say_nothing_are_refused(bad: float) -> None:
    weight = random_grouped(4, 32, group=16)
    scales = weight.scales.float()
    scales[2, 1] = bad
    with pytest.raises(CheckpointError, match="weight scales must be finite and above 0"):
        group_weight(
            words_of_rows(weight.values, 4),
            scales,
            None,
            bits=4,
            group=16,
            parts=(4,),
            in_features=32,
        )


def test_negative_scales_are_kept() -> None:
    weight = random_grouped(4, 32, group=16)
    finished = group_weight(
        words_of_rows(weight.values, 4),
        -weight.scales.float(),
        weight.zeros.to(torch.uint8),
        bits=4,
        group=16,
        parts=(4,),
        in_features=32,
    )
    assert torch.equal(finished.dequantize(), -weight.dense)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.1, 2.0**-24], torch.float16),
        ([2.0**-30, 1.5], torch.bfloat16),
        ([0.1, 1e5], torch.float32),
    ],
)
def test_scales_are_stored_in_the_narrowest_type_that_holds_them(
    values: list[float], dtype: torch.dtype
) -> None:
    scales = torch.tensor(values)
    if dtype != torch.float32:
        scales = scales.to(dtype).float()
    narrowed = narrow(scales)
    assert narrowed.dtype == dtype and torch.equal(narrowed.float(), scales)
