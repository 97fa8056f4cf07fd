"""What inputs rounded to eight bits are, by plain torch."""

import torch
from torch import Tensor

from rackmount_quant.kernels.rounding import LARGEST, RoundedRows, Rounding
from rackmount_registry.device.unpack import deinterleave


def defined(x: Tensor, how: Rounding) -> tuple[Tensor, Tensor]:
    """Values float32 [T, in] and scales [T, 1 or groups]."""
    values, scales, _ = _defined(x, how)
    return values, scales


def _defined(x: Tensor, how: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    groups = x.float().split(128 if how.per == "group" else x.shape[1], 1)
    largest = torch.cat([each.abs().amax(1, keepdim=True) for each in groups], 1)
    scales = torch.where(largest > 0, largest / LARGEST[how.dtype], 1.0)
    if how.given is not None:
        scales = how.given.expand(len(x), 1)
    spread = scales.repeat_interleave(128, 1)[:, : x.shape[1]] if how.per == "group" else scales
    exact = (x.float() / spread).clamp(-LARGEST[how.dtype], LARGEST[how.dtype])
    values = exact.round() if how.dtype == torch.int8 else exact.to(how.dtype).float()
    return values, scales, exact


def hold_rounded(rounded: RoundedRows, x: Tensor, how: Rounding, *, nearest: bool = True) -> None:
    """That `rounded` is x: to nearest, but for what float32 differs in, and else to a step in most
    places, as the interpreter makes e4m3."""
    values, scales, exact = _defined(x, how)
    assert rounded.values.dtype == how.dtype and rounded.dtype == x.dtype
    assert len(rounded) == len(x) and len(rounded.values) % how.rows_by == 0
    assert len(rounded.scales) == len(rounded.values) and rounded.scales.stride(0) == 1
    torch.testing.assert_close(rounded.scales[: len(x)], scales, rtol=4e-3, atol=0)
    got = deinterleave(rounded.values[: len(x)].float(), 8)
    assert not got[:, x.shape[1] :].any()
    got = got[:, : x.shape[1]]
    step = 1.01 if how.dtype == torch.int8 else exact.abs() / 8 + 2**-9
    near = ((got - exact).abs() <= step).float().mean()
    if nearest:
        assert near == 1 and (got == values).float().mean() > 0.95
    else:
        assert near > 0.8


def hold_no_number(rounded: RoundedRows, row: int, column: int) -> None:
    """That `rounded` has no number where the product would look for x[row, column], and numbers in
    other rows."""
    values = deinterleave(rounded.values[: len(rounded)].float(), 8)
    groups = rounded.scales.shape[1]
    spread = rounded.scales[: len(rounded)].repeat_interleave(128 if groups > 1 else 1, 1)
    wide = values * spread[:, : values.shape[1]]
    assert wide[row, column].isnan()
    others = torch.arange(len(wide), device=wide.device) != row
    assert wide[others].isfinite().all()
