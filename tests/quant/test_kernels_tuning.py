"""Which tiling a product of few rows gets."""

import json
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.tuning import BUCKETS, MAX_PARTS, HeldTiling, RowTiling, Tiling
from rackmount_registry.formats import EPILOGUES


def packed(form: str, n: int, k: int, group: int, panel: int = 128) -> Packed:
    """Without its memory."""
    by_panel = (-(-k // panel), n, panel // 8)
    shape = by_panel if form == "int4" else (n, -(-k // 16) * 4)
    return Packed(
        format=form,  # type: ignore[arg-type]
        words=torch.empty(shape, dtype=torch.int32, device="meta"),
        scales=torch.empty(0),
        zeros=None,
        order=None,
        n=n,
        k=k,
        group=group,
    )


@settings(deadline=None)
@given(
    form=st.sampled_from(("int4", "int8", "fp8")),
    n=st.integers(1, 200_000),
    k=st.integers(1, 60_000),
    group=st.sampled_from((0, 32, 64, 128, 1024)),
    bucket=st.sampled_from(BUCKETS),
    num_sms=st.sampled_from((1, 78, 132, 160)),
)
def test_the_rule_gives_tilings_that_run(
    form: str, n: int, k: int, group: int, bucket: int, num_sms: int
) -> None:
    panel = min(group or 128, 128)
    weight = packed(form, n, k, group, panel)
    tiling = tuning.rule(weight, bucket, num_sms)
    fits = weight.words.nbytes < tuning.MOST_BYTES
    assert (tiling is not None) == (bucket <= tuning.RULED_ROWS and fits)
    if tiling is not None:
        assert tiling.share > 0 and 1 <= tiling.parts(k) <= MAX_PARTS
        assert tiling.block_n >= tuning.MIN_BLOCK_N and (group or 128) % tiling.block_k == 0
        assert weight.panel in (None, tiling.block_k)


@given(k=st.integers(1, 60_000), share=st.integers(1, 500), num_sms=st.integers(1, 160))
def test_programs_wait_for_no_more_than_can_run_at_once(k: int, share: int, num_sms: int) -> None:
    tiling = Tiling(64, 128, share, 4, 4, 0, None)
    assert not tiling.waits(k, 8, num_sms)
    if tiling.waits(k, 64, num_sms):
        assert -(-k // 128) % share == 0 and -(-k // 128) // share <= num_sms


def test_groups_that_no_block_fits_in_have_no_tiling() -> None:
    for form, group in (("int4", 48), ("int4", 100), ("int8", 20)):
        weight = packed(form, 64, 4800, group, panel=32)
        assert tuning.block_k_of(weight) is None
        assert tuning.choose(weight, "none", 1) is None


def test_words_that_int32_cannot_count_have_no_tiling() -> None:
    for n, fits in (((1 << 19) - 1, True), (1 << 19, False)):
        weight = packed("int8", n, 4096, 128)
        assert (tuning.block_k_of(weight) is not None) == fits


def test_the_parts_of_a_tile_are_what_its_blocks_say() -> None:
    for blocks in range(1, 20):
        for share in range(1, 50):
            tiling = Tiling(32, 16, share, 2, 4, 0, None)
            counts = [
                (tile * blocks + blocks - 1) // share - tile * blocks // share + 1
                for tile in range(share)
            ]
            assert tiling.parts(16 * blocks) >= max(counts)
            if tiling.aligned(16 * blocks):
                assert tiling.parts(16 * blocks) == max(counts)


def test_a_table_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"fields": ["block_n", "block_k", "share", "stages", "warps", "prefetch", "registers"]}
    table["shapes"] = {"int4/128 512x1024 add": {"1": [64, 128, 2, 4, 4, 2, 96], "2": None}}
    monkeypatch.setattr(tuning, "table_of", lambda gpu: tuning.parse(table))
    properties = SimpleNamespace(name="a GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    weight = packed("int4", 512, 1024, 128)
    assert tuning.choose(weight, "add", 1) == Tiling(64, 128, 2, 4, 4, 2, 96)
    assert tuning.choose(weight, "add", 2) is None
    assert tuning.choose(weight, "add", 8) is None  # as many tokens a tile as two have
    assert tuning.choose(weight, "add", 32) == tuning.rule(weight, 32, 132)
    assert tuning.choose(weight, "none", 2) == tuning.rule(weight, 2, 132)


def test_one_row_has_a_tiling_of_its_own_where_that_was_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = [64, 128, 2, 4, 4, 2, 96]
    table = {
        "fields": ["block_n", "block_k", "share", "stages", "warps", "prefetch", "registers"],
        "row_fields": ["block_n", "step", "warps"],
        "shapes": {
            "int4/128 512x1024 add": {"row": [8, 32, 4], "1": few},
            "int4/128 512x1024 none": {"row": None, "1": few},
        },
    }
    monkeypatch.setattr(tuning, "table_of", lambda gpu: tuning.parse(table))
    properties = SimpleNamespace(name="a GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    weight = packed("int4", 512, 1024, 128)
    assert tuning.choose(weight, "add", 1) == RowTiling(8, 32, 4)
    assert tuning.choose(weight, "add", 2) == Tiling(*few)
    assert tuning.choose(weight, "none", 1) == Tiling(*few)
    assert tuning.choose(weight, "silu_mul", 1) == tuning.rule(weight, 1, 132)


def test_tokens_are_held_where_that_was_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [64, 128, 2, 4, 4, 2, 96]
    table = {
        "fields": ["block_n", "block_k", "share", "stages", "warps", "prefetch", "registers"],
        "shapes": {"int4/128 512x1024 add": {"1": few, "2": "held", "16": few}},
    }
    monkeypatch.setattr(tuning, "table_of", lambda gpu: tuning.parse(table))
    properties = SimpleNamespace(name="a GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    weight = packed("int4", 512, 1024, 128)
    chosen = [tuning.choose(weight, "add", bucket) for bucket in (1, 2, 4, 8, 16)]
    assert chosen == [Tiling(*few), *[HeldTiling()] * 3, Tiling(*few)]
    assert HeldTiling().takes(weight)


def test_rows_are_rounded_only_where_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"fields": ["block_n", "block_k", "share", "stages", "warps", "prefetch", "registers"]}
    few = [64, 128, 2, 4, 4, 2, None]
    table["shapes"] = {
        "fp8/rows 512x1024 none": {"1": few},
        "fp8/rows rounded 512x1024 none": {"16": few, "64": None},
    }
    monkeypatch.setattr(tuning, "table_of", lambda gpu: tuning.parse(table))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    weight = packed("fp8", 512, 1024, 0)
    assert tuning.choose_rounded(weight, "none", 16) == "exact"  # on a CPU
    words = SimpleNamespace(device=torch.device("cuda"))
    on_gpu = SimpleNamespace(words=words, kind=weight.kind, n=weight.n, k=weight.k)
    ways = [tuning.choose_rounded(on_gpu, "none", bucket) for bucket in (8, 16, 32, 64, 128)]
    assert ways == ["exact", Tiling(*few), "exact", "many", "exact"]
    assert tuning.choose_rounded(on_gpu, "add", 16) == "exact"


def test_a_gpu_without_a_table_has_none() -> None:
    assert tuning.table_of("NVIDIA L4") == {}


def test_shipped_tables_hold_legal_tilings() -> None:
    folder = files(tuning.__package__) / "tuned"
    for file in folder.iterdir() if folder.is_dir() else ():
        for name, row in tuning.parse(json.loads(file.read_text())).items():
            kind, *rounded, shape, epilogue = name.split()
            assert rounded in ([], ["rounded"])
            assert epilogue in ("none", *EPILOGUES) and set(row) <= {"row", *BUCKETS}
            k, group = int(shape.split("x")[1]), kind.split("/")[1]
            cut = row.pop("row", None)
            assert cut is None or (not rounded and cut.step & (cut.step - 1) == 0)
            held = [bucket for bucket, each in row.items() if isinstance(each, HeldTiling)]
            assert all(bucket <= tuning.HELD_ROWS for bucket in held)
            for tiling in (row.pop(bucket) for bucket in held):
                n = int(shape.split("x")[0])
                weight = packed(kind.split("/")[0], n, k, int(group))
                assert not rounded and tiling.takes(weight)
            for tiling in filter(None, row.values()):
                assert tiling.parts(k) <= MAX_PARTS
                assert group == "rows" or int(group) % tiling.block_k == 0
