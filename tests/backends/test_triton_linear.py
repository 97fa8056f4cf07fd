"""The Triton linear kernel in the interpreter, against float64; what chooses its tiling."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import last_program_first, mend_loops
from torch import Tensor

from rackmount_backends.triton_linear import kernel, linear, tuning
from rackmount_backends.triton_linear.linear import Prepared, TritonLinear
from rackmount_backends.triton_linear.tuning import BUCKETS, MAX_PARTS, Tiling
from rackmount_registry.device.ahead import AheadCompiler
from rackmount_registry.formats import EPILOGUES, Weight

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3}
WHOLE = Tiling(block_n=16, block_k=16, share=8, stages=2, warps=4, prefetch=2, tma=False)
"""Of K = 128: a program has a tile."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def prepare(tiling: Tiling | None, n: int, k: int, dtype: torch.dtype = torch.float32) -> Prepared:
    weight = Weight("dense", {"weight": draw(n, k, dtype=dtype)}, (n,), k)
    return TritonLinear(lambda *_: tiling).prepare(weight)


def run(epilogue: str, x: Tensor, prepared: Prepared, bias: Tensor | None = None) -> Tensor:
    """The product with its epilogue, held to float64."""
    kernel, n = TritonLinear(), len(prepared.weight)
    wide = x.double() @ prepared.weight.double().T
    wide = wide if bias is None else wide + bias.double()
    if epilogue == "none":
        out = kernel.run(x, prepared, bias)
    elif epilogue == "silu_mul":
        out = kernel.run_silu_mul(x, prepared, bias)
        gate, up = wide.chunk(2, -1)
        wide = torch.nn.functional.silu(gate) * up
    else:
        residual = draw(len(x), n + 3, dtype=x.dtype)[:, 3:]
        out = kernel.run_add(x, prepared, bias, residual)
        wide = wide + residual.double()
    assert out.dtype == x.dtype and out.is_contiguous()
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(out.double(), wide, rtol=tolerance, atol=tolerance * 10)
    return out


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_loops(monkeypatch)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is not a number."""
    torch.manual_seed(0)
    monkeypatch.setattr(linear.torch, "empty", lambda *a, **k: torch.full(*a, torch.nan, **k))


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "add"])
@pytest.mark.parametrize("share", [1, 3, 4, 5, 8, 12, 16, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_programs_may_share_tiles_in_any_way_and_come_in_any_order(
    epilogue: str, share: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backward:
        last_program_first(monkeypatch)
    prepared = prepare(replace(WHOLE, share=share), 28, 128)
    run(epilogue, draw(3, 136)[:, 8:], prepared, draw(28) if backward else None)
    assert not prepared.arrivals.any()


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "add"])
def test_half_precision_is_rounded_once(epilogue: str) -> None:
    half = torch.float16
    prepared = prepare(replace(WHOLE, share=5), 44, 128, half)
    run(epilogue, draw(3, 128, dtype=half), prepared, draw(44, dtype=half))


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "add"])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33])
@pytest.mark.parametrize(("n", "k"), [(6, 5), (16, 16), (34, 50)])
def test_sizes_need_not_fill_tiles(epilogue: str, rows: int, n: int, k: int) -> None:
    tiling = replace(WHOLE, block_k=32, share=1)
    run(epilogue, draw(rows, k), prepare(tiling, n, k), draw(n))


def test_more_programs_may_share_a_tile_than_there_are_tiles() -> None:
    run("none", draw(2, 16 * MAX_PARTS), prepare(replace(WHOLE, share=1), 16, 16 * MAX_PARTS))


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "add"])
def test_without_a_tiling_the_product_is_cublas_s(epilogue: str) -> None:
    for biased in (False, True):
        run(epilogue, draw(3, 40), prepare(None, 24, 40), draw(24) if biased else None)


@pytest.mark.parametrize("tiling", [WHOLE, None], ids=["kernel", "cublas"])
@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "add"])
def test_no_tokens_and_too_many_of_them_are_products_too(
    tiling: Tiling | None, epilogue: str
) -> None:
    prepared = prepare(tiling, 32, 64)
    assert len(run(epilogue, draw(0, 64), prepared)) == 0
    run(epilogue, draw(tuning.MAX_ROWS + 1, 64), prepared)


@pytest.mark.parametrize("share", [3, 4])
def test_a_row_does_not_depend_on_the_other_rows(share: int) -> None:
    prepared = prepare(replace(WHOLE, share=share), 48, 64)
    x = draw(5, 64)
    out = run("none", x, prepared)
    x[[0, 1, 3, 4]] = torch.nan
    assert torch.equal(TritonLinear().run(x, prepared, None)[2], out[2])


def test_the_parts_of_a_tile_are_what_its_blocks_say() -> None:
    for blocks in range(1, 20):
        for share in range(1, 50):
            tiling = replace(WHOLE, share=share)
            counts = [
                (tile * blocks + blocks - 1) // share - tile * blocks // share + 1
                for tile in range(share)
            ]
            assert tiling.parts(16 * blocks) >= max(counts)
            if tiling.aligned(16 * blocks):
                assert tiling.parts(16 * blocks) == max(counts)


def test_a_table_says_which_tiling_or_that_cublas_is_faster() -> None:
    table = tuning.parse(
        {
            "fields": ["block_n", "block_k", "share", "stages", "warps", "prefetch", "tma"],
            "shapes": {"48x64 add": {"1": [16, 16, 8, 2, 4, 2, False], "2": None}},
        }
    )
    assert table == {"48x64 add": {1: WHOLE, 2: None}}


@settings(deadline=None)
@given(
    n=st.integers(1, 10_000).map(lambda units: 16 * units),
    k=st.integers(1, 500).map(lambda units: 128 * units),
    bucket=st.sampled_from(BUCKETS),
    num_sms=st.sampled_from((1, 78, 132, 160)),
)
@example(n=256, k=12160, bucket=1, num_sms=132)
@example(n=1024, k=8064, bucket=16, num_sms=132)
@example(n=16, k=131072, bucket=1, num_sms=132)
def test_the_rule_gives_tilings_that_run_and_stops_where_its_table_does(
    n: int, k: int, bucket: int, num_sms: int
) -> None:
    tiling = tuning.rule(n, k, bucket, num_sms)
    known = bucket <= tuning.RULED_ROWS and n * k >= tuning.LEAST_RULED_WEIGHT
    assert (tiling is not None) == known
    if tiling is not None:
        assert tiling.share > 0 and 1 <= tiling.parts(k) <= MAX_PARTS


def test_odd_shapes_are_cublas_s() -> None:
    assert tuning.rule(4096, 4096, 1, num_sms=132) is not None
    assert tuning.rule(4096, 4097, 1, num_sms=132) is None
    assert tuning.rule(4097, 4096, 1, num_sms=132) is None


def test_the_rule_s_bounds_are_those_of_the_shipped_table() -> None:
    table = tuning.table_of("NVIDIA H200")
    sizes = [[*map(int, name.split()[0].split("x"))] for name in table]
    assert min(n * k for n, k in sizes) == tuning.LEAST_RULED_WEIGHT

    def lost(bucket: int) -> set[str]:
        return {name for name, row in table.items() if row[bucket] is None}

    ruled = [bucket for bucket in BUCKETS if bucket <= tuning.RULED_ROWS]
    assert set().union(*map(lost, ruled)) == {"28672x4096 none"}
    assert len(lost(2 * tuning.RULED_ROWS)) > 1


@pytest.mark.parametrize(
    ("gpu", "measured", "similar"),
    [
        ("NVIDIA H200", 32, tuning.RULED_ROWS),
        ("NVIDIA H200 MIG 1g.18gb", 0, 0),
        ("NVIDIA L4", 0, 0),
    ],
)
def test_without_a_table_of_the_gpu_every_product_is_cublas_s(
    gpu: str, measured: int, similar: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=gpu, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for k, most in ((4096, measured), (2048, similar)):
        weight = torch.zeros(1).expand(4096, k)
        for bucket in BUCKETS:
            assert (tuning.choose(weight, "none", bucket) is not None) == (bucket <= most)


def test_a_product_waits_before_the_next_kernel_may_start() -> None:
    """What attention relies on; see `rackmount_registry.device.launch`."""
    source = inspect.getsource(kernel)
    assert source.count("gdc_wait()") == source.count("gdc_launch_dependents()") == 1
    assert source.index("gdc_wait()") < source.index("gdc_launch_dependents()")


def test_shipped_tables_hold_legal_tilings() -> None:
    for file in (tuning.files(tuning.__package__) / "tuned").iterdir():
        for name, row in tuning.parse(tuning.json.loads(file.read_text())).items():
            shape, epilogue = name.split()
            assert epilogue in ("none", *EPILOGUES) and set(row) <= set(BUCKETS)
            parts = [tiling.parts(int(shape.split("x")[1])) for tiling in row.values() if tiling]
            assert max(parts, default=1) <= MAX_PARTS


def test_shipped_tilings_beat_cublas_in_the_record_of_their_measurement() -> None:
    root = Path(__file__).resolve().parents[2]
    record = json.loads((root / "benchmarks/results/h200/decode_gemm.json").read_text())
    figures = {(f"{p['n']}x{p['k']} {p['epilogue']}", p["rows"]): p for p in record["products"]}
    wrong = [
        f"{name}, {bucket} rows: {tiling} against {figures[name, bucket]}"
        for name, row in tuning.table_of(record["gpu"]).items()
        for bucket, tiling in row.items()
        if tiling is not None
        and (
            Tiling(**figures[name, bucket]["tiling"]) != tiling
            or figures[name, bucket]["us"] > figures[name, bucket]["cublas_us"]
        )
    ]
    assert not wrong


class Compiled:
    """A kernel that remembers what it was compiled for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def warmup(self, **arguments: Any) -> None:
        self.asked.append(arguments)
        if arguments["M"] == 13:
            raise ValueError("no such tile")


def test_each_kernel_is_compiled_ahead_once_and_failures_are_told() -> None:
    ahead, kernel = AheadCompiler(), Compiled()
    for key, rows in (("a", 1), ("b", 2), ("a", 3)):
        ahead.start(kernel, key, {"M": rows})
    ahead.wait()
    assert sorted(each["M"] for each in kernel.asked) == [1, 2]
    ahead.wait()
    ahead.start(kernel, "c", {"M": 13})
    with pytest.raises(ValueError, match="no such tile"):
        ahead.wait()
