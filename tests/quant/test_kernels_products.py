"""Kernels for quantized weights in the interpreter: few rows and many, against float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.interpreter import last_program_first, mend_casts, mend_loops
from tests.helpers.weights import fp8_blocks, fp8_rows, int8_rows, int_groups, poison
from torch import Tensor

from rackmount_quant.kernels.fp8 import Fp8Linear
from rackmount_quant.kernels.grouped import GroupedLinear
from rackmount_quant.kernels.int8 import Int8Linear
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.many_rows import dequantize
from rackmount_quant.kernels.rounded_linear import RoundedProduct
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_quant.kernels.tuning import BUCKETS, MAX_ROWS, Tiling, block_k_of
from rackmount_registry.device.unpack import deinterleave
from rackmount_registry.formats import Weight

WEIGHTS: dict[str, Callable[[], Weight]] = {
    "int4, groups of 32": lambda: int_groups(4, 40, 96, 32),
    "int4, groups of 64, cut off": lambda: int_groups(4, 40, 152, 64, zeros=True),
    "int4, groups of 128": lambda: int_groups(4, 24, 256, 128),
    "int4, groups of 256, cut off": lambda: int_groups(4, 72, 600, 256, zeros=True),
    "int4, groups of 64, little left": lambda: int_groups(4, 40, 80, 64, zeros=True),
    "int4, a scale a row": lambda: int_groups(4, 36, 200, 200),
    "int4, a scale a row, little left": lambda: int_groups(4, 40, 152, 152),
    "int4, a scale and a zero a row": lambda: int_groups(4, 36, 200, 200, zeros=True),
    "int4, act-order": lambda: int_groups(4, 40, 128, 32, zeros=True, padding=5),
    "int8 groups": lambda: int_groups(8, 40, 96, 32, zeros=True),
    "int8 groups, act-order": lambda: int_groups(8, 40, 80, 16, padding=3),
    "int8 rows": lambda: int8_rows(40, 72),
    "fp8 rows": lambda: fp8_rows(40, 144),
    "fp8 rows, odd": lambda: fp8_rows(38, 51),
    "fp8 blocks": lambda: fp8_blocks((128, 40), 200),
    "fp8 blocks, parts cut off": lambda: fp8_blocks((20, 44), 160),
}
UNTILED = {
    "groups of 48": lambda: int_groups(4, 20, 96, 48, zeros=True),
    "groups of 20": lambda: int_groups(8, 20, 60, 20),
}
EPILOGUES = ("none", "silu_mul", "add")
KERNELS = {"int4_groups": GroupedLinear, "int8_groups": GroupedLinear, "int8_rows": Int8Linear}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mend_loops(monkeypatch)
    poison(monkeypatch)


def prepare(
    weight: Weight, share: int | None = None, block_n: int = 32, warps: int = 4
) -> tuple[QuantizedLinear, Prepared]:
    """With `share` blocks a program for few rows; None: all rows are many. Of 64 weight rows a tile
    on, and more than eight tokens, there is one product a block, not one for each plane of words.
    """

    def choose(packed, epilogue: str, bucket: int) -> Tiling | None:
        block_k = block_k_of(packed)
        if share is None or block_k is None:
            return None
        return Tiling(block_n, block_k, share, 2, warps, prefetch=2, registers=None)

    kernel = KERNELS.get(weight.format, Fp8Linear)(choose)
    return kernel, kernel.prepare(weight)


def hold(
    epilogue: str,
    x: Tensor | RoundedRows,
    weight: Weight,
    made: tuple[QuantizedLinear, Prepared],
    bias: Tensor | None = None,
    exact: Tensor | None = None,
) -> Tensor:
    """The product with its epilogue, held to float64; `exact` is what a rounded x stands for."""
    (kernel, prepared), n = made, weight.out_features
    wide = (x if exact is None else exact).double() @ weight.dequantize().double().T
    wide = wide if bias is None else wide + bias.double()
    if epilogue == "none":
        out = kernel.run(x, prepared, bias)
    elif epilogue == "silu_mul":
        out = kernel.run_silu_mul(x, prepared, bias)
        gate, up = wide.chunk(2, -1)
        wide = F.silu(gate) * up
    else:
        residual = torch.randn(len(x), n + 3).to(x.dtype)[:, 3:]
        out = kernel.run_add(x, prepared, bias, residual)
        wide = wide + residual.double()
    assert out.dtype == x.dtype and out.is_contiguous() and out.shape == wide.shape
    size = float(wide.abs().max()) if wide.numel() else 0.0
    torch.testing.assert_close(out.double(), wide, rtol=2e-3, atol=2e-3 * size)
    assert not prepared.arrivals.any()
    return out


def draw(rows: int, weight: Weight) -> Tensor:
    return torch.randn(rows, weight.in_features + 8).half()[:, 8:]


@pytest.mark.parametrize(
    ("name", "epilogue"),
    [(name, EPILOGUES[index % 3]) for index, name in enumerate(WEIGHTS)]
    + [("int8 rows", epilogue) for epilogue in EPILOGUES],
)
@pytest.mark.parametrize(("rows", "block_n"), [(3, 32), (3, 64), (17, 64)])
def test_few_rows_of_every_format(name: str, epilogue: str, rows: int, block_n: int) -> None:
    weight = WEIGHTS[name]()
    bias = torch.randn(weight.out_features).half()
    hold(epilogue, draw(rows, weight), weight, prepare(weight, 3, block_n), bias)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "warps"), [(3, 2), (16, 2), (65, 4)])
def test_tiles_of_several_mma_for_each_warp(rows: int, warps: int, epilogue: str) -> None:
    """Their rows' zeros come in halves, and one sum of the tokens serves them all."""
    weight = int_groups(4, 296, 256, 128, zeros=True)
    hold(epilogue, draw(rows, weight), weight, prepare(weight, 2, 128, warps))


def test_a_large_input_leaves_the_others_their_digits() -> None:
    """Values bear an offset on their way: it must not drown what is small."""
    weight = int_groups(4, 64, 256, 128)
    words = weight.tensors["values"]
    words[:, 0] = words[:, 0] & 0x0FFFFFFF | -(1 << 31)  # column 7 is all zeros
    x = draw(3, weight) / 16 + 1
    x[:, 7] = 16_000
    hold("none", x, weight, prepare(weight, 2))


@pytest.mark.parametrize("exponent", [20, 100])
def test_scales_of_any_size_are_what_they_are(exponent: int) -> None:
    """Sums change their units from group to group, as far as float32 reaches, and signs."""
    weight = int_groups(4, 40, 256, 32)
    small = 2.0**-exponent
    spread = torch.tensor([1.0, -1.0, small, 1.0, small, -3.0, 0.5, small])
    scales = weight.tensors["scales"].float() * spread
    scales[7] = 2.0**-100  # rows are apart as far as they like
    weight = replace(weight, tensors=weight.tensors | {"scales": scales})
    made = prepare(weight, 3)
    assert (made[1].tiling("none", 3) is None) == (exponent == 100)
    hold("none", draw(3, weight), weight, made)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "share", "epilogue"),
    [
        (17, 1024, 128, 2, "add"),
        (33, 1024, 128, 4, "silu_mul"),
        (40, 896, 128, 1, "none"),
        (64, 384, 128, 1, "silu_mul"),
        (12, 576, 32, 1, "add"),
        (33, 288, 32, 2, "add"),
    ],
    ids=["4 parts", "2 parts", "7 parts", "3 parts", "more parts than tokens", "one after another"],
)
def test_tiles_of_many_tokens_are_added_up_by_pieces(
    rows: int, columns: int, group: int, share: int, epilogue: str
) -> None:
    weight = int_groups(4, 72, columns, group)
    hold(epilogue, draw(rows, weight), weight, prepare(weight, share, 64))


@pytest.mark.parametrize("name", [*WEIGHTS, *UNTILED])
def test_many_rows_multiply_with_the_dequantized_weight(name: str) -> None:
    weight = (WEIGHTS | UNTILED)[name]()
    made = prepare(weight)
    packed, dense = made[1].packed, weight.dequantize().half()
    order = torch.arange(packed.k) if packed.order is None else packed.order.long()
    stored = dequantize(packed, torch.float16)[:, order >= 0]
    assert torch.equal(stored, dense[:, order[order >= 0]])
    bias = torch.randn(weight.out_features).half()
    hold(EPILOGUES[len(name) % 3], draw(5, weight), weight, made, bias)
    assert not made[0].adds(made[1], 5)


@pytest.mark.parametrize("share", [1, 2, 4, 5, 7, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_programs_may_share_tiles_in_any_way_and_come_in_any_order(
    share: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backward:
        last_program_first(monkeypatch)
    for weight in (int_groups(4, 72, 192, 32), int8_rows(72, 500)):
        hold("silu_mul" if backward else "none", draw(2, weight), weight, prepare(weight, share))


@pytest.mark.parametrize("share", [None, 3], ids=["many", "few"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_no_tokens_and_too_many_are_products_too(share: int | None, epilogue: str) -> None:
    for weight in (int_groups(4, 32, 64, 32, padding=2), int8_rows(32, 64, "token")):
        made = prepare(weight, share)
        assert len(hold(epilogue, draw(0, weight), weight, made)) == 0
    weight = int_groups(4, 32, 32, 32)
    hold(epilogue, draw(MAX_ROWS + 1, weight), weight, prepare(weight, share))


@pytest.mark.parametrize("share", [3, 4])
@pytest.mark.parametrize("rows", [5, 12, 70])
def test_a_row_does_not_depend_on_the_other_rows(rows: int, share: int) -> None:
    weight = int_groups(4, 40, 128, 32, zeros=True)
    (kernel, prepared), x = prepare(weight, share), draw(rows, weight)
    out = kernel.run(x, prepared, None)
    x[[0, 1, *range(3, rows)]] = torch.nan
    assert torch.equal(kernel.run(x, prepared, None)[2], out[2])


@pytest.mark.parametrize("activation", ["token", "tensor"])
def test_many_rows_of_int8_are_rounded_as_the_scheme_says(activation) -> None:
    weight = int8_rows(48, 80, activation)
    kernel, prepared = prepare(weight)
    bias = torch.randn(48).half()
    for rows in (1, 16, 17, 40):
        x = draw(rows, weight)
        out = kernel.run(x, prepared, bias)
        scales = x.double().abs().amax(1, keepdim=True) / 127
        if activation == "tensor":
            scales = weight.tensors["input_scale"].double().expand(rows, 1)
        rounded = (x.double() / scales).round().clamp(-127, 127) * scales
        wide = rounded @ weight.dequantize().double().T + bias.double()
        torch.testing.assert_close(out.double(), wide, rtol=2e-3, atol=2e-2)
        assert kernel.rounds(prepared, rows)


def test_a_rounded_input_is_that_of_the_kernel() -> None:
    weight = int8_rows(48, 80, "token")
    kernel, prepared = prepare(weight, share=1)
    x, gate, up = draw(40, weight), draw(40, weight), draw(40, weight)
    gains, residual = torch.randn(80).half(), draw(40, weight)
    assert not kernel.rounds(prepared, 40) and kernel.rounds(prepared, MAX_ROWS + 1)
    many = prepare(weight)[1]
    total = (x.float() + residual.float()).half()
    norm = F.rms_norm(total.float(), (80,), eps=1e-5).half() * gains
    rounded, got = kernel.round_norm(x, residual, gains, 1e-5, prepared)
    assert torch.equal(got, total)
    torch.testing.assert_close(
        kernel.run(rounded, prepared, None), kernel.run(norm, many, None), rtol=1e-2, atol=0.1
    )
    rounded = kernel.round_silu_mul(gate, up, prepared)
    wanted = (F.silu(gate.float()) * up.float()).half()
    for method in (kernel.run, kernel.run_silu_mul):
        torch.testing.assert_close(
            method(rounded, prepared, None), method(wanted, many, None), rtol=2e-2, atol=0.2
        )


ROUNDED: dict[str, Callable[[], Weight]] = {
    "int8 token": lambda: int8_rows(48, 80, "token"),
    "int8 static": lambda: int8_rows(48, 72, "tensor"),
    "fp8 token": lambda: fp8_rows(40, 144, "token"),
    "fp8 static, odd": lambda: fp8_rows(38, 51, "tensor"),
    "fp8 blocks": lambda: fp8_blocks((128, 40), 232, "group"),
    "fp8 blocks, parts cut off": lambda: fp8_blocks((20, 44), 160, "group"),
}


@pytest.mark.parametrize(
    ("share", "counts"), [(2, (1, 17)), (3, (5, 17)), (100, (1, 5))], ids=["2", "3", "100"]
)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", ROUNDED)
def test_few_rounded_rows_give_their_product(
    monkeypatch: pytest.MonkeyPatch, name: str, epilogue: str, share: int, counts: tuple[int, ...]
) -> None:
    mend_casts(monkeypatch)
    weight = ROUNDED[name]()
    rounding = Rounding(
        dtype=torch.int8 if "int8" in name else torch.float8_e4m3fn,
        per=weight.activation,
        given=weight.tensors.get("input_scale"),
    )
    kernel = KERNELS.get(weight.format, Fp8Linear)(lambda *_: None)
    prepared = kernel.prepare(weight)
    tiling = Tiling(32, 32, share, stages=3, warps=4, prefetch=2, registers=None)
    ways = {epilogue: (tiling,) * len(BUCKETS) for epilogue in EPILOGUES}
    words = prepared.packed.words.view(rounding.dtype)
    many = RoundedProduct(rounding=rounding, values=words, scales=words, ways=ways)
    prepared = replace(prepared, many=many)
    bias = torch.randn(weight.out_features).half()
    for rows in counts:
        assert kernel.adds(prepared, rows)
        rounded = rounding.round(draw(rows, weight))
        values = deinterleave(rounded.values[:rows].double(), 8)[:, : weight.in_features]
        scales = rounded.scales[:rows].double()
        if weight.activation == "group":
            scales = scales.repeat_interleave(128, 1)[:, : weight.in_features]
        hold(epilogue, rounded, weight, (kernel, prepared), bias, exact=values * scales)


FEW = Tiling(32, 32, 3, stages=3, warps=4, prefetch=0, registers=None)


@pytest.mark.parametrize(
    ("exact", "way", "rounds", "adds"),
    [
        (FEW, "exact", False, True),
        (FEW, FEW, True, True),
        (FEW, "many", True, False),
        (None, "exact", True, False),
        (None, FEW, True, True),
    ],
)
def test_rows_are_rounded_where_the_choice_says_so(exact, way, rounds: bool, adds: bool) -> None:
    weight = int8_rows(48, 80, "token")
    kernel = Int8Linear(lambda *_: exact, lambda *_: way)
    prepared, x = kernel.prepare(weight), draw(3, weight)
    assert kernel.rounds(prepared, 3) == rounds and kernel.adds(prepared, 3) == adds
    assert kernel.rounds(prepared, MAX_ROWS + 1) and not kernel.adds(prepared, MAX_ROWS + 1)
    rounded = prepared.many.rounding.round(x)
    for method in (kernel.run, kernel.run_silu_mul):
        out = method(x, prepared, None)
        assert torch.equal(out, method(rounded, prepared, None)) == rounds
        assert len(method(x[:0], prepared, None)) == 0
    if not rounds:
        hold("none", x, weight, (kernel, prepared))


def test_a_scheme_that_rounds_nothing_has_the_exact_product_whatever_the_choice() -> None:
    weight = int8_rows(48, 80)
    kernel = Int8Linear(lambda *_: FEW, lambda *_: FEW)
    prepared = kernel.prepare(weight)
    assert not kernel.rounds(prepared, 3) and kernel.adds(prepared, 3)
    hold("none", draw(3, weight), weight, (kernel, prepared))


def test_prepared_words_hold_the_weight_once() -> None:
    weight = int_groups(4, 64, 256, 128, zeros=True)
    words = prepare(weight)[1].packed.words
    assert words.numel() == weight.tensors["values"].numel()
    rows = fp8_rows(32, 64)
    words = prepare(rows)[1].packed.words
    stored = rows.tensors["values"].view(torch.uint8)
    assert torch.equal(deinterleave(words.view(torch.uint8), 8), stored)


def test_a_plain_scheme_rounds_no_input() -> None:
    for activation, rounds in (("plain", False), ("token", True)):
        kernel, prepared = prepare(int8_rows(48, 80, activation))
        assert kernel.rounds(prepared, 40) == rounds
    odd = int8_rows(40, 80, "token")  # the product wants rows by 16
    kernel, prepared = prepare(odd)
    assert not kernel.rounds(prepared, 40)
    hold("none", draw(40, odd), odd, (kernel, prepared))
    assert replace(prepared, many=None) == prepared
