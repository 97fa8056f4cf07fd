"""Which plan a layer of Triton experts gets."""

from dataclasses import replace

import pytest
import torch

from rackmount_moe.triton_experts import tuning
from rackmount_moe.triton_experts.packing import CODES, Packed
from rackmount_moe.triton_experts.table import BUCKETS, MAX_FEW, Plan, Table, Tiling
from rackmount_registry.errors import ConfigError

WIDE = Tiling(64, 128, 4, 4, programs=2, tma=True)
NARROW = Tiling(32, 64, 3, 4)
ROW = {1: Plan(NARROW, WIDE, 0, 2), 64: Plan(WIDE, NARROW, 16)}
TABLE = Table(about={"gpu": "NVIDIA Some"}, shapes={"dense 8x64x32": ROW})


def packed(fmt: str, experts: int, rows: int, columns: int) -> Packed:
    values = torch.empty((experts, rows, columns), device="meta")
    return Packed(format=fmt, code=CODES[fmt], values=values, rows=rows, columns=columns)


def test_a_bucket_that_was_not_measured_gets_the_next_one_s_plan() -> None:
    found = [tuning.nearest(ROW, bucket) for bucket in (1, 8, 64, 128)]
    assert found == [ROW[1], ROW[64], ROW[64], ROW[64]]
    assert tuning.nearest({}, 4) is None
    assert tuning.nearest({MAX_FEW: ROW[1]}, MAX_FEW) == ROW[1]
    assert tuning.nearest({MAX_FEW: ROW[1]}, 2 * MAX_FEW) is None


def test_no_bucket_gets_the_plan_of_one_that_is_far_away() -> None:
    few, many = {256: ROW[64]}, {8192: ROW[64]}
    assert [b for b in BUCKETS if tuning.nearest(few, b)] == [32, 64, 128, 256, 512, 1024]
    assert [b for b in BUCKETS if tuning.nearest(many, b)] == [b for b in BUCKETS if b >= 1024]
    assert not any(tuning.nearest(few | many, bucket) for bucket in (1, 16, 512))


@pytest.mark.parametrize("fmt", CODES)
@pytest.mark.parametrize(("experts", "hidden", "width"), [(128, 2048, 768), (8, 4096, 14336)])
def test_the_rule_gives_legal_plans(fmt: str, experts: int, hidden: int, width: int) -> None:
    gate_up, down = packed(fmt, experts, 2 * width, hidden), packed(fmt, experts, hidden, width)
    for bucket in BUCKETS:
        assert_legal(tuning.rule(gate_up, down, bucket), bucket)


def assert_legal(plan: Plan, bucket: int) -> None:
    """Beyond what plans themselves refuse."""
    assert plan.block_m or bucket <= MAX_FEW
    assert not plan.block_m or min(plan.gate_up.stages, plan.down.stages) > 1


def test_tokens_share_the_bucket_that_holds_them() -> None:
    assert [BUCKETS[tuning.bucket_of(count)] for count in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert BUCKETS[tuning.bucket_of(10**6)] == BUCKETS[-1]


class OnGpu(list):
    """Stands in for the values of eight experts."""

    device = torch.device("cuda")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Packed, Packed, Packed]:
    """The first and second weight of the layer that was measured, and a first one that was not."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some")
    monkeypatch.setattr(tuning, "shipped", lambda gpu: TABLE)
    gate_up, down = packed("dense", 8, 64, 64), packed("dense", 8, 64, 32)
    other = replace(gate_up, rows=128, values=OnGpu(range(8)))
    return replace(gate_up, values=OnGpu(range(8))), down, other


def test_layers_of_a_gpu_and_shape_that_were_measured_get_their_plans(
    on_gpu: tuple[Packed, Packed, Packed],
) -> None:
    gate_up, down, other = on_gpu
    assert tuning.choose(gate_up, down, 64) == ROW[64]
    assert tuning.choose(other, down, 64) == tuning.rule(other, down, 64)


MINE = Plan(NARROW, NARROW, 32)


def test_ones_own_table_goes_before_the_one_that_comes_along(
    on_gpu: tuple[Packed, Packed, Packed],
) -> None:
    gate_up, down, other = on_gpu
    own = replace(TABLE, shapes={"dense 8x64x64": {64: MINE}, "dense 8x64x32": {1: MINE}})
    assert tuning.choose(other, down, 64, own) == MINE
    assert tuning.choose(other, down, 1, own) == tuning.rule(other, down, 1)
    assert tuning.choose(gate_up, down, 1, own) == MINE
    assert tuning.choose(gate_up, down, 64, own) == ROW[64]


def test_of_buckets_between_the_nearer_table_decides(
    on_gpu: tuple[Packed, Packed, Packed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One's own, of a few requests that decode, says nothing about prefill."""
    gate_up, down, _ = on_gpu
    prefill = Plan(WIDE, WIDE, 128)
    shipped = TABLE.extended("dense 8x64x32", {8192: prefill})
    monkeypatch.setattr(tuning, "shipped", lambda gpu: shipped)
    own = replace(TABLE, shapes={"dense 8x64x32": dict.fromkeys((16, 256), MINE)})
    found = {bucket: tuning.choose(gate_up, down, bucket, own) for bucket in BUCKETS}
    assert found[1] == ROW[1] and found[64] == ROW[64]
    assert found[2] == found[16] == found[128] == found[256] == MINE
    assert found[512] == tuning.rule(gate_up, down, 512)
    assert {found[bucket] for bucket in BUCKETS if bucket >= 1024} == {prefill}


def test_a_table_without_the_layer_s_shape_is_refused_with_those_that_it_has(
    on_gpu: tuple[Packed, Packed, Packed],
) -> None:
    _, down, other = on_gpu
    refusal = r"tuned: no plans for 'dense 8x64x64' .* has: dense 8x64x32, fp8_rows 1x2x3"
    with pytest.raises(ConfigError, match=refusal):
        tuning.choose(other, down, 64, TABLE.extended("fp8_rows 1x2x3", ROW))
    with pytest.raises(ConfigError, match=r"has: none"):
        tuning.choose(other, down, 64, replace(TABLE, shapes={}))


def test_a_table_of_another_gpu_is_refused_with_both_names(
    on_gpu: tuple[Packed, Packed, Packed],
) -> None:
    own = replace(TABLE, about={"gpu": "NVIDIA Other"})
    with pytest.raises(ConfigError, match="measured on NVIDIA Other, and this is NVIDIA Some"):
        tuning.choose(*on_gpu[:2], 64, own)


def test_shipped_tables_hold_legal_plans() -> None:
    folder = tuning.files(tuning.__package__) / "tuned"
    for file in folder.iterdir():
        table = Table.parse(file.read_text())
        assert file.name == f"{table.about['gpu'].replace(' ', '_')}.json"
        for name, row in table.shapes.items():
            assert name.split()[0] in CODES
            for bucket, plan in row.items():
                assert_legal(plan, bucket)


@pytest.mark.parametrize("fmt", ["dense", "fp8_blocks", "int4_groups"])
def test_on_an_h200_a_sane_plan_comes_between_those_that_were_measured(fmt: str) -> None:
    table = tuning.shipped("NVIDIA H200")
    assert table is not None
    row = table.shapes[f"{fmt} 128x2048x768"]
    for bucket in (1, 16, 64, 256, 8192):
        assert tuning.nearest(row, bucket) == row[bucket]
    assert tuning.nearest(row, 1024) == row[8192]
    assert [b for b in BUCKETS if tuning.nearest(row, b) is None] == [512]
