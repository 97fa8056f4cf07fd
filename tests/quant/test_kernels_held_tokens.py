"""Products of up to eight rows by programs that hold their tokens, interpreted."""

from typing import Any

import pytest
import torch
from tests.helpers.interpreter import last_program_first, mend_loops
from tests.helpers.weights import int_groups, poison
from tests.quant.test_kernels_products import draw, hold

from rackmount_quant.kernels.grouped import GroupedLinear
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear, num_sms_of, plan
from rackmount_quant.kernels.tuning import HeldTiling, Tiling
from rackmount_registry.formats import Weight

EPILOGUES = ("none", "silu_mul", "add")
WHOLE = HeldTiling(block_n=16, warps=8, steps=2, programs=1, registers=128)
"""Of up to 2048 columns."""
CUTS = {
    "a tile a program": (WHOLE, 64, 2048),
    "two tiles for some": (WHOLE, 16 * 45, 256),
    "wider tiles": (HeldTiling(32, 8, 1, 1, 128), 96, 1024),
    "more warps": (HeldTiling(16, 16, 1, 1, 128), 48, 2048),
    "more warps, wider": (HeldTiling(32, 16, 2, 1, 128), 64, 512),
    "warps without columns": (HeldTiling(32, 8, 4, 2, None), 64, 640),
    "one warp has all": (WHOLE, 32, 256),
}
SLICES = {
    "two": (HeldTiling(16, 8, 1, 2, 128), 48, 2048),
    "the last is short": (HeldTiling(32, 8, 1, 2, 128), 64, 1408),
    "of more warps, several tiles": (HeldTiling(16, 16, 1, 1, 128), 16 * 40, 4096),
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mend_loops(monkeypatch)
    poison(monkeypatch)


def prepare(weight: Weight, tiling: HeldTiling) -> tuple[QuantizedLinear, Prepared]:
    """A way to multiply up to eight rows with it, which is this kernel's."""

    def choose(packed: Any, epilogue: str, bucket: int) -> HeldTiling | Tiling:
        if bucket > 8 or not tiling.takes(packed, epilogue):
            return Tiling(64, 128, 1, 2, 4, prefetch=2, registers=None)
        return tiling

    kernel = GroupedLinear(choose)
    return kernel, kernel.prepare(weight)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_product(cut: str, epilogue: str, zeros: bool) -> None:
    tiling, n, k = CUTS[cut]
    weight = int_groups(4, n, k, 128, zeros=zeros)
    made = prepare(weight, tiling)
    assert tiling.takes(made[1].packed, epilogue)
    hold(epilogue, draw(1 + n % 8, weight), weight, made, torch.randn(n).half())


@pytest.mark.parametrize("epilogue", ["none", "add"])
@pytest.mark.parametrize("cut", SLICES)
def test_slices_of_columns_are_added_up(
    cut: str, epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if epilogue == "add":
        last_program_first(monkeypatch)
    tiling, n, k = SLICES[cut]
    weight = int_groups(4, n, k, 128, zeros=True)
    made = prepare(weight, tiling)
    assert tiling.slices(k) > 1 and tiling.takes(made[1].packed, epilogue)
    assert not tiling.takes(made[1].packed, "silu_mul")
    first = hold(epilogue, draw(5, weight), weight, made, torch.randn(n).half())
    assert first.isfinite().all()
    hold(epilogue, draw(8, weight), weight, made)  # the counters are ready for the next one


@pytest.mark.parametrize("rows", range(1, 10))
def test_any_number_of_rows(rows: int) -> None:
    """Nine are another kernel's."""
    weight = int_groups(4, 32, 512, 128)
    hold("none", draw(rows, weight), weight, prepare(weight, WHOLE))


def test_no_rows() -> None:
    weight = int_groups(4, 32, 256, 128)
    kernel, prepared = prepare(weight, WHOLE)
    assert kernel.run(draw(0, weight), prepared, None).shape == (0, 32)


def test_wider_groups_and_columns_in_act_order() -> None:
    wide = int_groups(4, 32, 1024, 256, zeros=True)
    hold("none", draw(3, wide), wide, prepare(wide, WHOLE))
    ordered = int_groups(4, 32, 512, 128, padding=5)
    hold("add", draw(3, ordered), ordered, prepare(ordered, WHOLE))


def test_a_large_input_leaves_the_others_their_digits() -> None:
    weight = int_groups(4, 32, 256, 128)
    words = weight.tensors["values"]
    words[:, 0] = words[:, 0] & 0x0FFFFFFF | -(1 << 31)  # column 7 is all zeros
    x = draw(3, weight) / 16 + 1
    x[:, 7] = 16_000
    hold("none", x, weight, prepare(weight, WHOLE))


def test_rows_that_are_not_asked_for_are_not_read() -> None:
    """What stands behind the last row of x may be anything."""
    weight = int_groups(4, 32, 256, 128)
    x = torch.full((8, weight.in_features), torch.nan).half()
    x[:3] = draw(3, weight)
    hold("none", x[:3], weight, prepare(weight, WHOLE))


@pytest.mark.parametrize(
    ("n", "k", "group", "tiling"),
    [
        (40, 256, 128, WHOLE),  # rows that fill no tile
        (32, 320, 128, WHOLE),  # columns that fill no block
        (32, 256, 64, WHOLE),  # groups narrower than a block
        (32, 256, 256, WHOLE),  # one scale a row
        (32, 4096, 128, HeldTiling(16, 16, 1, 1, None)),  # all who wait may not have room
        (32, 4096, 128, HeldTiling(16, 16, 1, 2, 128)),
    ],
)
def test_what_it_does_not_take(n: int, k: int, group: int, tiling: HeldTiling) -> None:
    _, prepared = prepare(int_groups(4, n, k, group), tiling)
    assert not tiling.takes(prepared.packed, "none")


def test_programs_are_no_more_than_there_is_room_for() -> None:
    """Else those that wait for the others' slices would keep them from starting."""
    tiling = HeldTiling(16, 8, 1, 2, 128)
    weight = int_groups(4, 16 * 200, 3072, 128)
    _, prepared = prepare(weight, tiling)
    x, out = draw(2, weight), torch.empty(2, weight.out_features).half()
    _, (programs,), _ = plan(tiling, x, prepared, None, None, out, False)
    assert programs % tiling.slices(3072) == 0
    assert programs <= tiling.programs * num_sms_of(x.device)
