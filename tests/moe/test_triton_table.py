"""Tables of tilings as files."""

import json
from pathlib import Path
from typing import Any

import pytest

from rackmount_moe.options import TritonExpertsOptions
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.table import Plan, Table, Tiling
from rackmount_registry.errors import ConfigError

WIDE = Tiling(64, 128, 4, 4, programs=2, tma=True)
NARROW = Tiling(32, 64, 3, 4, registers=168)
FEW, MANY = Plan(NARROW, WIDE, 0, 2), Plan(WIDE, NARROW, 16)
SHAPE = "dense 8x64x32"
WRITTEN: dict[str, Any] = {
    "gpu": "NVIDIA Some",
    "note": "kept",
    "fields": ["block_n", "block_k", "stages", "warps", "programs", "tma", "registers"],
    "shapes": {
        SHAPE: {
            "1": [0, 2, [32, 64, 3, 4, 0, False, 168], [64, 128, 4, 4, 2, True, 0]],
            "64": [16, 0, [64, 128, 4, 4, 2, True, 0], [32, 64, 3, 4, 0, False, 168]],
        }
    },
}


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "own.json"
    file.write_text(json.dumps(WRITTEN | changes))
    return file


def test_a_table_says_how_a_layer_is_computed(tmp_path: Path) -> None:
    table = Table.read(written(tmp_path))
    assert table.shapes == {SHAPE: {1: FEW, 64: MANY}}


def test_what_is_written_reads_the_same_and_keeps_what_else_was_there() -> None:
    table = Table.parse(json.dumps(WRITTEN))
    assert json.loads(table.text()) == WRITTEN
    more = table.extended(SHAPE, {16: MANY, 1: MANY}).extended("dense 2x3x4", {1: FEW})
    assert Table.parse(more.text()) == more
    assert list(more.shapes[SHAPE]) == [1, 16, 64]
    assert more.shapes[SHAPE][1] == MANY and more.about["note"] == "kept"
    assert table.shapes[SHAPE][1] == FEW, "tables are values"


def row(*values: Any) -> dict[str, Any]:
    return {"shapes": {SHAPE: {"64": list(values)}}}


GOOD = [64, 128, 4, 4, 2, True, 0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gpu": None}, "gpu=None must be a name"),
        ({"fields": ["block_n"]}, "zip"),
        ({"shapes": []}, "items"),
        ({"shapes": {SHAPE: {"48": [16, 0, GOOD, GOOD]}}}, "bucket 48 must be a power of two"),
        (row(48, 0, GOOD, GOOD), "block_m=48 must be one of 0, 16, 32, 64, 128"),
        (row(16, 3, GOOD, GOOD), "prefetch=3 must be a power of two, or 0"),
        (row(16, 0, GOOD), "unpack"),
        (row(16, 0, GOOD, [48, *GOOD[1:]]), "block_n=48 must be a power of two"),
        (row(16, 0, GOOD, ["64", *GOOD[1:]]), "block_n='64' must be a whole number"),
        (row(16, 0, [8, *GOOD[1:]], GOOD), "block_n=8 must be at least 16 where there are blocks"),
        (row(0, 0, [1, *GOOD[1:]], GOOD), "block_n=1 must be a whole number, 2 at least"),
        (row(16, 0, [64, 8, *GOOD[2:]], GOOD), "block_k=8 must be a whole number, 16 at least"),
        (
            row(0, 0, [64, 128, 0, 4, 0, False, 0], GOOD),
            "stages=0 must be a whole number, 1 at least",
        ),
        (row(16, 0, [64, 128, 3.0, 4, 0, False, 0], GOOD), "stages=3.0 must be a whole number"),
        (row(16, 0, [64, 128, True, 4, 0, False, 0], GOOD), "stages=True must be a whole number"),
        (row(16, 0, [64, 128, 3, 64, 0, False, 0], GOOD), "warps=64 must be 32 at most"),
        (row(16, 0, [64, 128, 3, 4, 1.5, False, 0], GOOD), "programs=1.5 must be a whole number"),
        (row(16, 0, [64, 128, 3, 4, 0, 1, 0], GOOD), "tma=1 must be true or false"),
        (row(16, 0, [*GOOD[:-1], 300], GOOD), "registers=300 must be 255 at most"),
        (row(16.0, 0, GOOD, GOOD), "block_m=16.0 must be one of 0, 16, 32, 64, 128"),
        (row(16, None, GOOD, GOOD), "prefetch=None must be a power of two, or 0"),
        (
            {"shapes": {"fp8_rows 8x64x32": {"64": [16, 0, GOOD, GOOD]}}},
            "'fp8_rows 8x64x32' at 64: tma=True is for dense weights alone",
        ),
    ],
)
def test_a_broken_table_is_refused_with_its_name(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"own\.json is no table of expert tilings") as refusal:
        TritonExpertsOptions(tuned=str(file))
    assert what in str(refusal.value)


def test_the_refusal_says_of_which_shape_and_bucket_it_speaks(tmp_path: Path) -> None:
    good = WRITTEN["shapes"][SHAPE]
    file = written(tmp_path, shapes={SHAPE: good | {"16": [48, 0, GOOD, GOOD]}})
    with pytest.raises(ConfigError, match="'dense 8x64x32' at 16: block_m=48 must be one of"):
        Table.read(file)


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_so_is_a_file_that_is_none_or_not_there(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "own.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"own\.json is no table of expert tilings"):
        TritonExpertsOptions(tuned=str(file))


def test_the_kernel_goes_by_the_table_that_its_option_names(tmp_path: Path) -> None:
    options = TritonExpertsOptions(tuned=str(written(tmp_path)))
    kernel = TritonExperts(options=options)
    assert kernel.choose.keywords == {"own": Table.read(tmp_path / "own.json")}
