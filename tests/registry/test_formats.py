import pytest
import torch

from rackmount_registry.formats import DENSE, WEIGHT_FORMATS, Weight

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
