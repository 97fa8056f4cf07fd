"""Weights repacked for the Triton kernels: where each value goes."""

import pytest
import torch
from torch import Tensor

from rackmount_moe.triton_experts.packing import Packed, pack
from rackmount_registry.device.unpack import deinterleave
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import Weight, unpack_int4

E, N = 2, 5


def weight(fmt: str, columns: int, group: int, **more: Tensor) -> Weight:
    torch.manual_seed(0)
    groups = -(-columns // group)
    if fmt == "int4_groups":
        high = 2**31
        values = torch.randint(-high, high, (E, N, -(-columns // 8)), dtype=torch.int32)
    else:
        values = torch.randint(0, 256, (E, N, columns), dtype=torch.uint8)
    tensors = {"values": values, "scales": torch.rand(E, N, groups), **more}
    return Weight(fmt, tensors, (N,), columns, group=group)


def unpacked(packed: Packed) -> Tensor:
    """[E, N, columns] of [E, blocks, N, words]: rows put together again, words in order."""
    rows = packed.values.transpose(1, 2).contiguous()
    if packed.code == "int4":
        return deinterleave(unpack_int4(rows), 4).flatten(2)
    return deinterleave(rows.view(torch.uint8), 8).flatten(2) ^ 128


@pytest.mark.parametrize("columns", [16, 128, 200, 512])
@pytest.mark.parametrize("fmt", ["int4_groups", "int8_groups"])
def test_rows_lie_block_by_block_and_are_padded(fmt: str, columns: int) -> None:
    given = weight(fmt, columns, columns)
    values = given.tensors["values"]
    plain = unpack_int4(values)[..., :columns] if fmt == "int4_groups" else values
    packed = pack(given)
    assert torch.equal(unpacked(packed)[..., :columns], plain)
    assert packed.values.shape[1] == -(-columns // packed.block_k)


@pytest.mark.parametrize(
    ("group", "block_k"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128)]
)
def test_a_group_is_whole_blocks(group: int, block_k: int) -> None:
    packed = pack(weight("int4_groups", 2 * group, group))
    assert (packed.block_k, packed.group, packed.groups) == (block_k, group, 2)


def test_scales_of_a_row_lie_together_and_one_scale_is_of_all_columns() -> None:
    zeros = torch.randint(0, 256, (E, N, 4), dtype=torch.uint8)
    given = weight("int8_groups", 256, 64, zeros=zeros)
    assert torch.equal(pack(given).scales, given.tensors["scales"])
    assert torch.equal(pack(given).zeros, zeros.float() - 128)
    one = pack(weight("int4_groups", 300, 300))
    assert (one.group, one.groups, one.block_k) == (0, 1, 128)


def test_padding_of_an_order_is_no_input() -> None:
    order = torch.stack([torch.randperm(200) for _ in range(E)]).int()
    packed = pack(weight("int4_groups", 200, 200, order=order))
    assert torch.equal(packed.order[:, :200], order)
    assert packed.order.shape[1] % packed.block_k == 0 and (packed.order[:, 200:] == -1).all()


def test_a_dense_weight_keeps_its_memory() -> None:
    dense = torch.randn(E, N, 7)
    assert pack(Weight("dense", {"weight": dense}, (N,), 7)).values is dense


@pytest.mark.parametrize("group", [8, 24, 48])
def test_groups_that_are_no_whole_blocks_are_refused(group: int) -> None:
    with pytest.raises(ConfigError, match=f"group={group} does not fit expert kernel triton"):
        pack(weight("int4_groups", 1536, group))
