"""Inputs rounded to eight bits, in the interpreter, against their definitions in torch.

The interpreter loses carries and subnormals of e4m3; on a GPU that is held to nearest.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.helpers.interpreter import mend_casts
from tests.helpers.rounding import defined, hold_no_number, hold_rounded
from tests.helpers.weights import poison
from triton.language import PropagateNan
from triton.runtime.interpreter import InterpreterBuilder

from rackmount_quant.kernels.rounding import LARGEST, Rounding
from rackmount_registry.device.unpack import deinterleave

FP8 = torch.float8_e4m3fn
PER = ("token", "tensor", "group")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison(monkeypatch)


def rounding(dtype: torch.dtype, per: str) -> Rounding:
    given = torch.tensor([0.01 if dtype == FP8 else 0.03]) if per == "tensor" else None
    return Rounding(dtype=dtype, per=per, given=given)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("size", [16, 72, 200, 256])
def test_an_input_is_rounded_to_nearest(dtype: torch.dtype, per: str, size: int) -> None:
    x = (torch.randn(3, size + 8) * torch.tensor([[1.0], [100.0], [1e-3]])).half()[:, 8:]
    how = rounding(dtype, per)
    rounded = how.round(x)
    hold_rounded(rounded, x, how, nearest=dtype != FP8)
    values, scales = defined(x, how)
    assert torch.equal(rounded.scales[:3], scales)
    if dtype == torch.int8:
        assert torch.equal(deinterleave(rounded.values[:3].float(), 8)[:, :size], values)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_rows_of_zeros_and_values_out_of_range_are_safe(dtype: torch.dtype, per: str) -> None:
    x = torch.zeros(2, 160).half()
    x[1, 130:] = 6e4
    rounded = rounding(dtype, per).round(x)
    values = deinterleave(rounded.values[:2].float(), 8)
    assert not values[0].any() and not values[1, :130].any()
    assert (values[1, 130:] == LARGEST[dtype]).all()
    assert rounded.scales[:2].isfinite().all() and (rounded.scales[:2] > 0).all()


@pytest.fixture
def clamps_drop_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs do, where they are not told otherwise."""

    def clamp(self, x, least, most, propagate):
        fits = (
            np.clip if propagate == PropagateNan.ALL else lambda x, a, b: np.fmin(np.fmax(x, a), b)
        )
        return self.ternary_op(x, least, most, fits)

    monkeypatch.setattr(InterpreterBuilder, "create_clampf", clamp)


@pytest.mark.usefixtures("clamps_drop_nan")
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_no_number_stays_none(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, per: str, sign: int
) -> None:
    mend_casts(monkeypatch)
    x, how = torch.randn(3, 160).half(), rounding(dtype, per)
    x[2] *= 1e-7  # the smallest that there are, and zeros
    x[1, 140] = torch.tensor(torch.nan).copysign(torch.tensor(float(sign)))
    hold_no_number(how.round(x), row=1, column=140)
    weight = torch.ones(160).half()
    hold_no_number(how.round_norm(x, None, weight, 1e-5)[0], row=1, column=140)
    hold_no_number(how.round_silu_mul(torch.ones_like(x), x), row=1, column=140)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_a_norm_is_rounded_in_its_pass(dtype: torch.dtype, per: str, added: bool) -> None:
    x, residual = torch.randn(3, 152)[:, :144].half(), torch.randn(3, 144).half()
    weight, how = torch.randn(144).half(), rounding(dtype, per)
    rounded, total = how.round_norm(x, residual if added else None, weight, 1e-5)
    wanted = (x.float() + residual.float()).half() if added else x
    assert torch.equal(total, wanted)
    norm = F.rms_norm(wanted.float(), (144,), eps=1e-5).half() * weight
    hold_rounded(rounded, norm, how, nearest=dtype != FP8)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_an_activation_is_rounded_in_its_pass(dtype: torch.dtype, per: str) -> None:
    gate, up = torch.randn(3, 288).half().chunk(2, -1)
    how = rounding(dtype, per)
    product = (F.silu(gate.float()) * up.float()).half()
    hold_rounded(how.round_silu_mul(gate, up), product, how, nearest=dtype != FP8)


def test_no_rows_are_rounded_to_none() -> None:
    for per in PER:
        rounded = rounding(FP8, per).round(torch.zeros(0, 144).half())
        assert rounded.values.shape == (0, 144) and len(rounded.scales) == 0
