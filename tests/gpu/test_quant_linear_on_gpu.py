"""Kernels for quantized weights, compiled: against float64, in every way to cut a weight."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.rounding import defined, hold_no_number, hold_rounded
from tests.helpers.weights import fp8_blocks, fp8_rows, int8_rows, int_groups, poison
from torch import Tensor

from rackmount_quant.kernels.fp8 import Fp8Linear
from rackmount_quant.kernels.grouped import GroupedLinear
from rackmount_quant.kernels.int8 import Int8Linear
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.many_rows import dequantize
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.rounding import LARGEST, Rounding
from rackmount_quant.kernels.tuning import (
    BUCKETS,
    HELD_ROWS,
    AnyTiling,
    HeldTiling,
    RowTiling,
    Tiling,
    block_k_of,
)
from rackmount_registry.formats import Weight

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
EPILOGUES = ("none", "silu_mul", "add")
KERNELS = {"int4_groups": GroupedLinear, "int8_groups": GroupedLinear, "int8_rows": Int8Linear}
WEIGHTS: dict[str, Callable[[], Weight]] = {
    "int4 128": lambda: int_groups(4, 1000, 1024, 128, device="cuda"),
    "int4 128 zeros": lambda: int_groups(4, 1000, 1024, 128, zeros=True, device="cuda"),
    "int4 64, cut off": lambda: int_groups(4, 520, 1000, 64, zeros=True, device="cuda"),
    "int4 32": lambda: int_groups(4, 520, 992, 32, device="cuda"),
    "int4 rows": lambda: int_groups(4, 1000, 1000, 1000, device="cuda"),
    "int4 rows zeros": lambda: int_groups(4, 1000, 1000, 1000, zeros=True, device="cuda"),
    "int4 act-order": lambda: int_groups(4, 512, 1024, 128, zeros=True, padding=9, device="cuda"),
    "int8 groups": lambda: int_groups(8, 512, 1024, 128, zeros=True, device="cuda"),
    "int8 rows": lambda: int8_rows(1000, 1000, device="cuda"),
    "fp8 rows": lambda: fp8_rows(1024, 1024, device="cuda"),
    "fp8 rows, odd": lambda: fp8_rows(514, 1001, device="cuda"),
    "fp8 blocks": lambda: fp8_blocks((512, 512), 1024, device="cuda"),
    "fp8 blocks, cut off": lambda: fp8_blocks((100, 900), 1000, device="cuda"),
}
FLAT = Tiling(64, 128, 6, stages=4, warps=4, prefetch=2, registers=None)
TILINGS = {
    "programs with blocks of several tiles": FLAT,
    "whole tiles": replace(FLAT, share=8),
    "split tiles": replace(FLAT, share=2, prefetch=1),
    "one program for all": replace(FLAT, share=1000),
    "wide tiles": replace(FLAT, block_n=128, share=3, registers=128),
    "eight warps": replace(FLAT, block_n=128, share=5, warps=8, prefetch=0),
    "planes": replace(FLAT, share=4, warps=2),
    "planes of wide tiles": replace(FLAT, block_n=128, share=4, warps=2),
    "two warpgroups deep": replace(FLAT, block_n=256, share=4, warps=8, registers=128),
}


ROW_TILINGS = {
    "all columns at once": RowTiling(16, 32, 4),
    "few warps": RowTiling(4, 8, 2),
    "step by step": RowTiling(8, 2, 2),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison(monkeypatch)


def prepare(weight: Weight, tiling: AnyTiling | None = FLAT) -> tuple[QuantizedLinear, Prepared]:
    """With a tiling for all products, its blocks as wide as the weight allows; None: many rows."""

    def choose(packed: Packed, epilogue: str, bucket: int) -> AnyTiling | None:
        if isinstance(tiling, Tiling):
            return replace(tiling, block_k=block_k_of(packed))
        if isinstance(tiling, HeldTiling):
            fits = bucket <= HELD_ROWS and tiling.takes(packed)
            return tiling if fits else replace(FLAT, block_k=block_k_of(packed))
        return tiling

    kernel = KERNELS.get(weight.format, Fp8Linear)(choose)
    return kernel, kernel.prepare(weight)


def product(
    epilogue: str,
    x: Tensor,
    made: tuple[QuantizedLinear, Prepared],
    bias: Tensor | None,
    residual: Tensor,
) -> Tensor:
    kernel, prepared = made
    if epilogue == "none":
        return kernel.run(x, prepared, bias)
    if epilogue == "silu_mul":
        return kernel.run_silu_mul(x, prepared, bias)
    return kernel.run_add(x, prepared, bias, residual)


def rows_apart(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns + 64, device="cuda").to(dtype)[:, 64:]


def error(
    epilogue: str,
    rows: int,
    weight: Weight,
    made: tuple[QuantizedLinear, Prepared],
    dtype: torch.dtype,
) -> float:
    """Relative to the product in float64."""
    x = rows_apart(rows, weight.in_features, dtype)
    bias = torch.randn(weight.out_features, device="cuda").to(dtype) if rows % 2 else None
    residual = rows_apart(rows, weight.out_features, dtype)
    out = product(epilogue, x, made, bias, residual).double()
    wide = x.double() @ weight.dequantize().double().T
    wide = wide if bias is None else wide + bias.double()
    if epilogue == "silu_mul":
        gate, up = wide.chunk(2, -1)
        wide = F.silu(gate) * up
    elif epilogue == "add":
        wide = wide + residual.double()
    assert not made[1].arrivals.any()
    return float((out - wide).norm() / wide.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_format_gives_the_product(name: str, epilogue: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    few, many = prepare(weight), prepare(weight, None)
    bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
    for rows in (1, 3, 8, 16, 17, 64, 100):
        assert error(epilogue, rows, weight, few, dtype) < bound
    for rows in (1, 100, 1000):
        assert error(epilogue, rows, weight, many, dtype) < 2 * bound


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    "name", ["int4 128", "int4 128 zeros", "int4 rows", "fp8 rows", "fp8 blocks, cut off"]
)
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_every_tiling_gives_the_product(tiling: Tiling, name: str, epilogue: str) -> None:
    weight = WEIGHTS[name]()
    made = prepare(weight, tiling)
    for rows in (2, 33):
        assert error(epilogue, rows, weight, made, torch.bfloat16) < 4e-3


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [(40, 896, 128), (64, 384, 128), (12, 1024, 32), (33, 4096, 128)],
    ids=["7 parts", "3 parts", "more parts than tokens", "32 parts"],
)
def test_all_who_share_a_tile_add_it_up(rows: int, columns: int, group: int, epilogue: str) -> None:
    weight = int_groups(4, 4096, columns, group, device="cuda")
    made = prepare(weight, replace(FLAT, share=1))
    for _ in range(5):
        assert error(epilogue, rows, weight, made, torch.bfloat16) < 4e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tiling", "large"),
    [
        *((tiling, 16_000) for tiling in (FLAT, HeldTiling())),
        *((tiling, 1000) for tiling in ROW_TILINGS.values()),
    ],
    ids=["few", "held", *ROW_TILINGS],
)
def test_a_large_input_leaves_the_others_their_digits(
    tiling: AnyTiling, large: int, dtype: torch.dtype
) -> None:
    """Values bear an offset on their way, which must not drown what is small: 16 in few rows, 256
    in one."""
    n = 1024 if isinstance(tiling, HeldTiling) else 1000
    weight = int_groups(4, n, 4096, 128, device="cuda")
    words = weight.tensors["values"]
    words[:, 0] = words[:, 0] & 0x0FFFFFFF | -(1 << 31)  # column 7 is all zeros
    x = torch.randn(1, 4096, device="cuda").to(dtype) / 16 + 1
    x[:, 7] = large
    kernel, prepared = prepare(weight, tiling)
    exact = x.double() @ weight.dequantize().double().T
    found = (kernel.run(x, prepared, None).double() - exact).abs().max() / exact.abs().max()
    # What rounding the largest result alone may cost, and some to spare.
    assert found < (4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("tiling", ROW_TILINGS.values(), ids=ROW_TILINGS)
def test_one_row_gives_the_product(tiling: RowTiling, name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    made = prepare(weight, tiling)
    for epilogue in EPILOGUES:
        bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
        assert error(epilogue, 1, weight, made, dtype) < bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group", [128, 256], ids="groups of {}".format)
@pytest.mark.parametrize("size", [(6144, 4096), (28672, 4096), (4000, 2560), (32, 768)], ids=str)
def test_held_tokens_give_the_product(
    size: tuple[int, int], group: int, zeros: bool, dtype: torch.dtype
) -> None:
    weight = int_groups(4, *size, group, zeros=zeros, device="cuda")
    made = prepare(weight, HeldTiling())
    assert HeldTiling().takes(made[1].packed)
    for epilogue, rows in itertools.product(EPILOGUES, range(1, HELD_ROWS + 1)):
        bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
        assert error(epilogue, rows, weight, made, dtype) < bound


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dequantized_weight_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]()
    packed = prepare(weight)[1].packed
    order = torch.arange(packed.k, device="cuda") if packed.order is None else packed.order.long()
    stored = dequantize(packed, dtype)[:, order >= 0]
    assert torch.equal(stored, weight.dequantize().to(dtype)[:, order[order >= 0]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: int_groups(4, 4096, 14336, 128, device="cuda"),
        lambda: int_groups(4, 28672, 4096, 128, device="cuda"),
        lambda: fp8_rows(6144, 4096, device="cuda"),
        lambda: fp8_blocks((4096,), 4096, device="cuda"),
    ],
    ids=["int4 down", "int4 gate_up", "fp8 qkv", "fp8 blocks o"],
)
def test_the_chosen_tilings_give_the_product(make: Callable[[], Weight]) -> None:
    weight = make()
    kernel = KERNELS.get(weight.format, Fp8Linear)()
    made = kernel, kernel.prepare(weight)
    for epilogue in EPILOGUES:
        for rows in (1, 2, 5, 8, 16, 17, 64, 100, 256, 257):
            assert error(epilogue, rows, weight, made, torch.bfloat16) < 8e-3
        nothing = torch.zeros(0, weight.in_features, device="cuda", dtype=torch.bfloat16)
        none = rows_apart(0, weight.out_features, torch.bfloat16)
        assert len(product(epilogue, nothing, made, None, none)) == 0


@pytest.mark.parametrize(
    ("rows", "tiling"),
    [
        (16, FLAT),
        (33, TILINGS["split tiles"]),
        (8, HeldTiling()),
    ],
    ids=["the last adds up", "all add up", "held tokens"],
)
def test_a_chain_in_a_graph_gives_the_same_bits_each_time(rows: int, tiling: AnyTiling) -> None:
    """Each product reads the one before, which may still be running as its kernel starts."""
    size = 4096
    weights = [int_groups(4, size, size, 128, device="cuda") for _ in range(4)]
    weights += [fp8_rows(size, size, device="cuda") for _ in range(4)]
    chain = [prepare(weight, tiling) for weight in weights]
    x = torch.randn(rows, size, device="cuda").bfloat16()

    def run() -> list[Tensor]:
        outs = [x]
        for kernel, prepared in chain:
            outs.append(kernel.run(F.rms_norm(outs[-1], (size,)), prepared, None))
        return outs

    wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, outs, wanted))
    assert not any(prepared.arrivals.any() for _, prepared in chain)


@pytest.mark.parametrize("per", ["token", "tensor", "group"])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_inputs_are_rounded_to_nearest(dtype: torch.dtype, per) -> None:
    given = torch.tensor([0.02], device="cuda") if per == "tensor" else None
    how = Rounding(dtype=dtype, per=per, given=given)
    for size in (4096, 14336, 1000):
        x, residual = torch.randn(2, 33, size, device="cuda").bfloat16()
        weight = torch.rand(size, device="cuda").bfloat16()
        hold_rounded(how.round(x), x, how)
        rounded, total = how.round_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        norm = F.rms_norm(total.float(), (size,), eps=1e-5).bfloat16() * weight
        hold_rounded(rounded, norm, how)
        product = (F.silu(x.float()) * residual.float()).bfloat16()
        hold_rounded(how.round_silu_mul(x, residual), product, how)


@pytest.mark.parametrize("per", ["token", "tensor", "group"])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype, per) -> None:
    given = torch.tensor([0.02], device="cuda") if per == "tensor" else None
    how = Rounding(dtype=dtype, per=per, given=given)
    weight = torch.ones(1000, device="cuda").bfloat16()
    for sign in (1.0, -1.0):
        x = torch.randn(5, 1000, device="cuda").bfloat16()
        x[4] *= 1e-39  # whose scale is far below the normal numbers
        x[3, 700] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
        for rounded in (
            how.round(x),
            how.round_norm(x, None, weight, 1e-5)[0],
            how.round_silu_mul(torch.ones_like(x), x),
        ):
            hold_no_number(rounded, row=3, column=700)


MANY_ROWS = pytest.mark.parametrize(
    "make",
    [
        lambda: fp8_rows(1024, 2048, "token", device="cuda"),
        lambda: fp8_rows(1024, 2048, "tensor", device="cuda"),
        lambda: fp8_blocks((512, 512), 2048, "group", device="cuda"),
        lambda: int8_rows(1024, 2048, "token", device="cuda"),
        lambda: int8_rows(1024, 2048, "tensor", device="cuda"),
    ],
    ids=["fp8 token", "fp8 static", "fp8 blocks", "int8 token", "int8 static"],
)


@MANY_ROWS
def test_many_rows_are_rounded_as_the_scheme_says(make: Callable[[], Weight]) -> None:
    """Against the same product of the input rounded by its definition."""
    weight = make()
    kernel, prepared = prepare(weight, None)
    if prepared.many is None:
        pytest.skip("this GPU has no such product")
    how: Rounding = prepared.many.rounding

    for rows in (1, 17, 300, 1000):
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        wide = rounded_product(x, how, weight)
        for out in (
            kernel.run(x, prepared, None),
            kernel.run(how.round(x), prepared, None),
        ):
            assert float((out.double() - wide).norm() / wide.norm()) < 8e-3


def rounded_product(x: Tensor, how: Rounding, weight: Weight) -> Tensor:
    """In float64, of x rounded by its definition."""
    values, scales = defined(x, how)
    spread = scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return (values * spread).double() @ weight.dequantize().double().T


@MANY_ROWS
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_few_rounded_rows_give_the_product(make: Callable[[], Weight], tiling: Tiling) -> None:
    weight = make()
    kernel, prepared = prepare(weight, None)
    if prepared.many is None:
        pytest.skip("this GPU has no such product")
    ways = {epilogue: (tiling,) * len(BUCKETS) for epilogue in EPILOGUES}
    how: Rounding = prepared.many.rounding
    made = kernel, replace(prepared, many=replace(prepared.many, ways=ways))
    for rows, epilogue in itertools.product((1, 16, 17, 64, 100), EPILOGUES):
        x = torch.randn(rows, 2048, device="cuda").to(torch.float16 if rows == 17 else DTYPES[0])
        residual = rows_apart(rows, weight.out_features, x.dtype)
        wide = rounded_product(x, how, weight)
        if epilogue == "silu_mul":
            gate, up = wide.chunk(2, -1)
            wide = F.silu(gate) * up
        elif epilogue == "add":
            wide = wide + residual.double()
        out = product(epilogue, x, made, None, residual).double()
        assert float((out - wide).norm() / wide.norm()) < 8e-3
    assert not prepared.arrivals.any()


@MANY_ROWS
def test_an_input_that_is_no_number_gives_none(make: Callable[[], Weight]) -> None:
    kernel, prepared = prepare(make(), None)
    if prepared.many is None:
        pytest.skip("this GPU has no such product")
    x = torch.randn(300, 2048, device="cuda").bfloat16()
    x[7, 1234] = torch.nan
    out = kernel.run(x, prepared, None)
    assert out[7].isnan().all()
    assert out[:7].isfinite().all() and out[8:].isfinite().all()
