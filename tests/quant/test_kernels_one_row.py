"""The kernel for one row in the interpreter, against float64."""

import pytest
import torch
from tests.helpers.interpreter import mend_loops
from tests.helpers.weights import fp8_blocks, int8_rows, int_groups, poison
from tests.quant.test_kernels_products import EPILOGUES, KERNELS, WEIGHTS, draw, hold

from rackmount_quant.kernels.fp8 import Fp8Linear
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.tuning import RowTiling, Tiling, block_k_of
from rackmount_registry.formats import Weight


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mend_loops(monkeypatch)
    poison(monkeypatch)


def prepare(weight: Weight, tiling: RowTiling) -> tuple[QuantizedLinear, Prepared]:
    """With `tiling` for one row; more rows are few."""

    def choose(packed, epilogue: str, bucket: int) -> RowTiling | Tiling:
        few = Tiling(32, block_k_of(packed), 3, 2, 4, prefetch=2, registers=None)
        return tiling if bucket == 1 else few

    kernel = KERNELS.get(weight.format, Fp8Linear)(choose)
    return kernel, kernel.prepare(weight)


@pytest.mark.parametrize("tiling", [RowTiling(16, 1, 4), RowTiling(8, 2, 4), RowTiling(16, 16, 4)])
@pytest.mark.parametrize(
    ("name", "epilogue"),
    [(name, EPILOGUES[index % 3]) for index, name in enumerate(WEIGHTS)]
    + [("fp8 rows, odd", epilogue) for epilogue in EPILOGUES],
)
def test_one_row_of_every_format(name: str, epilogue: str, tiling: RowTiling) -> None:
    weight = WEIGHTS[name]()
    made = prepare(weight, tiling)
    bias = torch.randn(weight.out_features).half()
    for given in (None, bias):
        hold(epilogue, draw(1, weight), weight, made, given)
    assert made[0].adds(made[1], 1)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_steps_that_fill_the_columns_read_them_all(epilogue: str) -> None:
    for weight in (
        int_groups(4, 24, 512, 128, zeros=True),
        int_groups(4, 24, 512, 256),
        int8_rows(24, 512),
        fp8_blocks((128, 24), 512),
    ):
        for step in (2, 4):
            hold(epilogue, draw(1, weight), weight, prepare(weight, RowTiling(8, step, 4)))


@pytest.mark.parametrize("rows", [0, 2])
def test_other_numbers_of_rows_go_another_way(rows: int) -> None:
    weight = int_groups(4, 40, 256, 128)
    hold("none", draw(rows, weight), weight, prepare(weight, RowTiling(8, 2, 4)))


def test_one_row_in_bfloat16() -> None:
    for name, make in WEIGHTS.items():
        weight = make()
        kernel, prepared = prepare(weight, RowTiling(8, 2, 4))
        x = draw(1, weight).bfloat16()
        out = kernel.run(x, prepared, None)
        wide = x.double() @ weight.dequantize().double().T
        size = float(wide.abs().max())
        torch.testing.assert_close(out.double(), wide, rtol=8e-3, atol=2e-3 * size, msg=name)
