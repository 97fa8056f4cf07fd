"""Which plan a layer of Triton experts gets."""

from dataclasses import replace

import pytest
import torch

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.packing import CODES, Packed
from rackmount_moe.triton_experts.tuning import BUCKETS, MAX_FEW, Plan, Tiling

WIDE = Tiling(64, 128, 4, 4, programs=2, tma=True)
NARROW = Tiling(32, 64, 3, 4)
TABLE = {
    "fields": ["block_n", "block_k", "stages", "warps", "programs", "tma"],
    "shapes": {
        "dense 8x64x32": {
            "1": [0, 2, [32, 64, 3, 4, 0, False], [64, 128, 4, 4, 2, True]],
            "64": [16, 0, [64, 128, 4, 4, 2, True], [32, 64, 3, 4, 0, False]],
        }
    },
}


def packed(fmt: str, experts: int, rows: int, columns: int) -> Packed:
    values = torch.empty((experts, rows, columns), device="meta")
    return Packed(format=fmt, code=CODES[fmt], values=values, rows=rows, columns=columns)


def test_a_table_says_how_a_layer_is_computed() -> None:
    row = tuning.parse(TABLE)["dense 8x64x32"]
    assert row == {1: Plan(NARROW, WIDE, 0, 2), 64: Plan(WIDE, NARROW, 16)}


def test_a_bucket_that_was_not_measured_gets_the_next_one_s_plan() -> None:
    row = tuning.parse(TABLE)["dense 8x64x32"]
    assert [tuning.nearest(row, bucket) for bucket in (1, 2, 64, 128)] == [
        row[1],
        row[64],
        row[64],
        row[64],
    ]
    assert tuning.nearest({}, 4) is None
    assert tuning.nearest({1: row[1]}, MAX_FEW) == row[1]
    assert tuning.nearest({1: row[1]}, 2 * MAX_FEW) is None


@pytest.mark.parametrize("fmt", CODES)
@pytest.mark.parametrize(("experts", "hidden", "width"), [(128, 2048, 768), (8, 4096, 14336)])
def test_the_rule_gives_legal_plans(fmt: str, experts: int, hidden: int, width: int) -> None:
    gate_up, down = packed(fmt, experts, 2 * width, hidden), packed(fmt, experts, hidden, width)
    for bucket in BUCKETS:
        assert_legal(tuning.rule(gate_up, down, bucket), bucket)


def assert_legal(plan: Plan, bucket: int) -> None:
    assert plan.block_m in (0, 16, 32, 64, 128)
    assert plan.block_m or bucket <= MAX_FEW
    assert plan.prefetch & (plan.prefetch - 1) == 0
    for tiling in (plan.gate_up, plan.down):
        assert tiling.stages > 1 and tiling.block_n >= (16 if plan.block_m else 2)
        assert tiling.warps in (1, 2, 4, 8, 16)


def test_tokens_share_the_bucket_that_holds_them() -> None:
    assert [BUCKETS[tuning.bucket_of(count)] for count in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert BUCKETS[tuning.bucket_of(10**6)] == BUCKETS[-1]


class OnGpu(list):
    """Stands in for the values of eight experts."""

    device = torch.device("cuda")


def test_layers_of_a_gpu_and_shape_that_were_measured_get_their_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some")
    monkeypatch.setattr(tuning, "table_of", lambda gpu: tuning.parse(TABLE))
    gate_up, down = packed("dense", 8, 64, 64), packed("dense", 8, 64, 32)
    other = replace(gate_up, rows=128, values=OnGpu(range(8)))
    gate_up = replace(gate_up, values=OnGpu(range(8)))
    assert tuning.choose(gate_up, down, 64) == Plan(WIDE, NARROW, 16)
    assert tuning.choose(other, down, 64) == tuning.rule(other, down, 64)


def test_shipped_tables_hold_legal_plans() -> None:
    folder = tuning.files(tuning.__package__) / "tuned"
    for file in folder.iterdir() if folder.is_dir() else ():
        for name, row in tuning.parse(tuning.json.loads(file.read_text())).items():
            assert name.split()[0] in CODES and set(row) <= set(BUCKETS)
            for bucket, plan in row.items():
                assert_legal(plan, bucket)
