import pytest
import torch

from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import DENSE, WEIGHT_FORMATS, Weight, unpack_int4
from rackmount_registry.scales import check_scales

VALUES = torch.tensor([[1, -2], [3, 4], [-127, 0]], dtype=torch.int8)
SCALES = torch.tensor([0.5, 2.0, 0.0])
INT8 = Weight("int8_rows", {"values": VALUES, "scales": SCALES}, (2, 1), 2)
PLAIN = torch.tensor([[0.5, -1.0], [6.0, 8.0], [0.0, 0.0]])


def test_int8_rows_are_values_times_the_scale_of_their_row() -> None:
    assert torch.equal(INT8.dequantize(), PLAIN)
    assert INT8.out_features == 3


def test_a_part_is_its_own_rows() -> None:
    assert torch.equal(INT8.dequantize(0), PLAIN[:2])
    assert torch.equal(INT8.dequantize(1), PLAIN[2:])


def test_a_bundle_dequantizes_whole_or_by_expert_and_part() -> None:
    tensors = {name: torch.stack((t, t.flip(0))) for name, t in INT8.tensors.items()}
    bundle = Weight("int8_rows", tensors, INT8.parts, 2)
    both = torch.stack((PLAIN, PLAIN.flip(0)))
    assert torch.equal(bundle.dequantize(), both)
    assert torch.equal(bundle.dequantize(1), both[:, 2:])
    assert torch.equal(bundle.expert(1).dequantize(0), both[1, :2])


def test_a_dense_weight_keeps_its_address() -> None:
    weight = DENSE.finish({"weight": PLAIN}, (3,), 2)
    assert weight.dequantize().data_ptr() == PLAIN.data_ptr()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_every_format_is_named_alike_and_says_what_its_tensors_mean(name: str) -> None:
    spec = WEIGHT_FORMATS[name]
    assert spec.name == name
    assert spec.tensors
    assert all(spec.tensors.values())


FP8 = torch.float8_e4m3fn


def test_fp8_rows_are_values_times_the_scale_of_their_row() -> None:
    values = torch.tensor([[1.0, -448.0], [0.5, 2.0]]).to(FP8)
    weight = Weight("fp8_rows", {"values": values, "scales": torch.tensor([2.0, 0.25])}, (1, 1), 2)
    assert torch.equal(weight.dequantize(), torch.tensor([[2.0, -896.0], [0.125, 0.5]]))


def test_every_part_of_fp8_blocks_begins_a_block_row() -> None:
    values = torch.ones(130 + 3, 129).to(FP8)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    dense = Weight("fp8_blocks", {"values": values, "scales": scales}, (130, 3), 129).dequantize()
    assert dense.shape == (133, 129)
    for row, column, scale in (
        (0, 127, 1),
        (127, 128, 2),
        (129, 0, 3),
        (130, 127, 5),
        (132, 128, 6),
    ):
        assert dense[row, column] == scale


def pack(values: torch.Tensor) -> torch.Tensor:
    """Values 0..15 [out, S] to words, one at a time, as the format is defined."""
    out, stored = values.shape
    words = torch.zeros(out, -(-stored // 8), dtype=torch.int64)
    for row in range(out):
        for column in range(stored):
            words[row, column // 8] |= int(values[row, column]) << 4 * (column % 8)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_groups_are_values_less_the_zero_times_the_scale(bits: int, asymmetric: bool) -> None:
    random = torch.Generator().manual_seed(bits)
    values = torch.randint(0, 2**bits, (3, 10), generator=random)
    scales = torch.rand(3, 3, generator=random).half()
    zeros = torch.randint(0, 2**bits, (3, 3), generator=random)
    tensors = {"values": pack(values) if bits == 4 else values.to(torch.uint8), "scales": scales}
    if asymmetric:
        tensors["zeros"] = zeros.to(torch.uint8)
    dense = Weight(f"int{bits}_groups", tensors, (3,), 10, group=4).dequantize()
    for row in range(3):
        for column in range(10):
            zero = int(zeros[row, column // 4]) if asymmetric else 2 ** (bits - 1)
            value = (int(values[row, column]) - zero) * scales[row, column // 4].float()
            assert dense[row, column] == value


def test_stored_columns_go_to_the_inputs_that_the_order_names() -> None:
    values = torch.tensor([[1, 2, 3, 4]])
    order = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    tensors = {"values": pack(values), "scales": torch.ones(1, 2), "order": order}
    tensors["zeros"] = torch.zeros(1, 2, dtype=torch.uint8)
    weight = Weight("int4_groups", tensors, (1,), 3, group=2)
    assert torch.equal(weight.dequantize(), torch.tensor([[3.0, 4.0, 1.0]]))
    bundle = Weight(
        "int4_groups", {name: torch.stack((t, t)) for name, t in tensors.items()}, (1,), 3, group=2
    )
    assert torch.equal(bundle.dequantize()[1], weight.dequantize())
    assert torch.equal(bundle.expert(1).dequantize(), weight.dequantize())


def test_experts_share_the_scale_of_their_input() -> None:
    values = torch.ones(2, 1, 2).to(FP8)
    tensors = {"values": values, "scales": torch.ones(2, 1), "input_scale": torch.tensor([3.0])}
    bundle = Weight("fp8_rows", tensors, (1,), 2, activation="tensor")
    expert = bundle.expert(1)
    assert (expert.tensors["input_scale"].tolist(), expert.activation) == ([3.0], "tensor")


def test_words_hold_their_lowest_bits_first() -> None:
    assert unpack_int4(torch.tensor([0x76543210, -0x01234568], dtype=torch.int32)).tolist() == list(
        range(16)
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_finite_and_above_zero(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"weight_scale must be finite.* 1 of 3 are not"):
        check_scales(torch.tensor([1.0, value, 2.0]), "weight_scale")
    assert check_scales(torch.tensor([1.0]), "weight_scale").item() == 1
