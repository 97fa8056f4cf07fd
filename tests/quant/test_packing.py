"""Words of integers, against a packing of the test's own and against compressed-tensors'."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.packings import words_of_rows
from torch import Tensor

from rackmount_quant.packing import midpoint, pack, unpack, unpack_parts


def random_fields(bits: int, rows: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << bits, (rows, size), generator=generator).to(torch.uint8)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    rows=st.integers(1, 5),
    size=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_fields_are_packed_lowest_bits_first(bits: int, rows: int, size: int, seed: int) -> None:
    fields = random_fields(bits, rows, size, seed)
    packed = pack(fields, bits)
    assert torch.equal(packed, words_of_rows(fields, bits))
    assert torch.equal(unpack(packed, bits)[:, :size], fields)
    assert not unpack(packed, bits)[:, size:].any()


@settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    rows=st.integers(1, 5),
    size=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_compressed_tensors_packs_alike(bits: int, rows: int, size: int, seed: int) -> None:
    fields = random_fields(bits, rows, size, seed)
    signed = (fields.int() - midpoint(bits)).to(torch.int8)
    packed = pack_to_int32(signed, bits)
    assert torch.equal(pack(fields, bits), packed)
    shape = torch.Size((rows, size))
    assert torch.equal(unpack_from_int32(pack(fields, bits), bits, shape), signed)
    by_rows = pack_to_int32(signed, bits, packed_dim=0)
    assert torch.equal(unpack_parts(by_rows.mT, [rows], bits).mT, fields)


def test_leading_dimensions_and_views_are_packed_as_they_look() -> None:
    fields = random_fields(4, 6, 16, 0)
    stacked = fields.view(2, 3, 16)
    assert torch.equal(pack(stacked, 4), pack(fields, 4).view(2, 3, 2))
    assert torch.equal(pack(fields.mT[:8].mT, 4), pack(fields[:, :8].clone(), 4))
    assert torch.equal(unpack(pack(fields, 4).mT, 4), unpack(pack(fields, 4).mT.contiguous(), 4))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("parts", [(8, 16), (5, 3), (1, 9, 8)])
def test_each_part_begins_a_word_of_its_own(parts: tuple[int, ...], bits: int) -> None:
    fields = random_fields(bits, 3, sum(parts), 1)
    packed = torch.cat([pack(part, bits) for part in fields.split(parts, -1)], -1)
    assert torch.equal(unpack_parts(packed, parts, bits), fields)
