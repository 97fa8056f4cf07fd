"""Integers of compressed-tensors whose tensors disagree with each other."""

from dataclasses import replace

import pytest
from tests.helpers.packings import compressed_tensors, random_grouped
from tests.helpers.schemes import load

from rackmount_quant.integers import Integers, integer_format
from rackmount_registry.errors import CheckpointError

PACKED = Integers(bits=4, per="group", group=32)


@pytest.mark.parametrize(
    ("part", "axis", "value", "message"),
    [
        (0, 1, 63, r"weight_shape has \[63, 64\] columns.* needs 64"),
        (0, 0, 8, r"weight_shape has \[8\] rows.* needs 16$"),
        (0, 0, 32, r"weight_shape has \[32\] rows.* needs 16$"),
        (1, 0, 8, r"weight_shape has \[8\] rows.* needs \[4\]$"),
        (1, 0, 3, r"weight_shape has \[3\] rows.* needs \[4\]$"),
    ],
)
def test_a_shape_with_other_rows_or_columns_is_refused(
    part: int, axis: int, value: int, message: str
) -> None:
    packed = [
        compressed_tensors(random_grouped(rows, 64, group=32), symmetric=True) for rows in (16, 4)
    ]
    stored = integer_format(PACKED, (16, 64))
    load(stored, packed, (16, 4), 64)
    packed[part]["weight_shape"][axis] = value
    with pytest.raises(CheckpointError, match=message):
        load(stored, packed, (16, 4), 64)


@pytest.mark.parametrize("rows", [4, 8, 2, 6, 12])
def test_a_rank_that_has_a_share_knows_how_many_may_have_another(rows: int) -> None:
    """Two ranks have 8 of 16 rows each, and 4 of 4 or of 8 in the second part."""
    stored = integer_format(PACKED, (16, 64))
    packed = [compressed_tensors(random_grouped(n, 64, group=32), symmetric=True) for n in (8, 4)]
    packed[0]["weight_shape"][0], packed[1]["weight_shape"][0] = 16, rows
    if rows in (4, 8):
        load(stored, packed, (8, 4), 64)
        return
    with pytest.raises(CheckpointError, match=r"rows, .* needs \[4\], or up to 2 times"):
        load(stored, packed, (8, 4), 64)


@pytest.mark.parametrize("share", [49, 48, 1, 0])
def test_a_vocabulary_may_be_cut_unevenly(share: int) -> None:
    """97 rows by two ranks, or by more of which the last has few or none."""
    stored = integer_format(PACKED, (97, 64))
    packed = compressed_tensors(random_grouped(share, 64, group=32), symmetric=True)
    packed["weight_shape"][0] = 97
    load(stored, [packed], (share,), 64)
    packed["weight_shape"][0] = 98
    with pytest.raises(CheckpointError, match=r"has \[98\] rows, and the model needs 97"):
        load(stored, [packed], (share,), 64)


def test_bytes_beyond_four_bits_are_refused() -> None:
    packed = compressed_tensors(random_grouped(8, 64, group=32), packed=False, symmetric=True)
    packed["weight"][3, 5] = 8
    with pytest.raises(CheckpointError, match="must be from -8 to 7"):
        load(integer_format(replace(PACKED, packed=False), (8, 64)), [packed], (8,), 64)
