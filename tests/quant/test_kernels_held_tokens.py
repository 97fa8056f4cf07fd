"""Products of up to eight rows by programs that hold their tokens, interpreted."""

from typing import Any

import pytest
import torch
from tests.helpers.interpreter import mend_loops
from tests.helpers.weights import int_groups, poison
from tests.quant.test_kernels_products import draw, hold

from rackmount_quant.kernels.grouped import GroupedLinear
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear, num_sms_of, plan
from rackmount_quant.kernels.tuning import HELD_ROWS, HeldTiling, Tiling
from rackmount_registry.formats import Weight

EPILOGUES = ("none", "silu_mul", "add")
HELD = HeldTiling()
SIZES = {
    "a tile a program": (64, 2048),
    "two tiles for some": (16 * 45, 256),
    "two steps a warp": (48, 4096),
    "warps without columns": (32, 640),
    "and steps": (32, 2176),
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mend_loops(monkeypatch)
    poison(monkeypatch)


def prepare(weight: Weight) -> tuple[QuantizedLinear, Prepared]:
    """A way to multiply up to eight rows with it, which is this kernel's."""

    def choose(packed: Any, epilogue: str, bucket: int) -> HeldTiling | Tiling:
        assert HELD.takes(packed)
        return HELD if bucket <= HELD_ROWS else Tiling(64, 128, 1, 2, 4, 2, registers=None)

    kernel = GroupedLinear(choose)
    return kernel, kernel.prepare(weight)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_gives_the_product(size: str, epilogue: str, zeros: bool) -> None:
    n, k = SIZES[size]
    weight = int_groups(4, n, k, 128, zeros=zeros)
    x = draw(1 + n // 16 % 8, weight)
    if epilogue == "silu_mul":
        x /= 8  # its exponentials stay within float16
    hold(epilogue, x, weight, prepare(weight), torch.randn(n).half())


@pytest.mark.parametrize("rows", range(1, 10))
def test_any_number_of_rows(rows: int) -> None:
    """Nine are another kernel's."""
    weight = int_groups(4, 32, 512, 128)
    hold("none", draw(rows, weight), weight, prepare(weight))


def test_no_rows() -> None:
    weight = int_groups(4, 32, 256, 128)
    kernel, prepared = prepare(weight)
    assert kernel.run(draw(0, weight), prepared, None).shape == (0, 32)


def test_wider_groups_and_columns_in_act_order() -> None:
    wide = int_groups(4, 32, 1024, 256, zeros=True)
    hold("none", draw(3, wide), wide, prepare(wide))
    ordered = int_groups(4, 32, 512, 128, padding=5)
    hold("add", draw(3, ordered), ordered, prepare(ordered))


def test_a_large_input_leaves_the_others_their_digits() -> None:
    weight = int_groups(4, 32, 256, 128)
    words = weight.tensors["values"]
    words[:, 0] = words[:, 0] & 0x0FFFFFFF | -(1 << 31)  # column 7 is all zeros
    x = draw(3, weight) / 16 + 1
    x[:, 7] = 16_000
    hold("none", x, weight, prepare(weight))


def test_rows_that_are_not_asked_for_are_not_read() -> None:
    """What stands behind the last row of x may be anything."""
    weight = int_groups(4, 32, 256, 128)
    x = torch.full((8, weight.in_features), torch.nan).half()
    x[:3] = draw(3, weight)
    hold("none", x[:3], weight, prepare(weight))


@pytest.mark.parametrize(
    ("n", "k", "group"),
    [
        (40, 256, 128),  # rows that fill no tile
        (32, 320, 128),  # columns that fill no block
        (32, 4224, 128),  # more than a program's warps can hold
        (32, 256, 64),  # groups narrower than a block
        (32, 256, 256),  # one scale a row
    ],
)
def test_what_it_does_not_take(n: int, k: int, group: int) -> None:
    kernel = GroupedLinear(lambda packed, *_: None)
    assert not HELD.takes(kernel.prepare(int_groups(4, n, k, group)).packed)


def test_there_is_a_program_for_each_multiprocessor_or_tile() -> None:
    for n in (16, 16 * 200):
        weight = int_groups(4, n, 256, 128)
        x, out = draw(2, weight), torch.empty(2, n).half()
        _, grid, _ = plan(HELD, x, prepare(weight)[1], None, None, out, False)
        assert grid == (min(n // 16, num_sms_of(x.device)),)
