"""Words that become operands, in the interpreter: every value, in its column."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rackmount_quant.kernels.packed import PANELS, panels
from rackmount_quant.kernels.planes import (
    fp8_planes,
    int4_planes,
    int8_planes,
    plane_columns,
)
from rackmount_registry.device.unpack import (
    deinterleave,
    interleave,
    pack_nibbles,
    unpack_fp8,
    unpack_int4,
    unpack_int8,
)

ROWS = 16


@triton.jit
def unpack_kernel(
    words,
    zeros,
    out,
    FORMAT: tl.constexpr,
    PLANES: tl.constexpr,
    OFFSET: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    RUNS: tl.constexpr,
    dtype: tl.constexpr,
):
    NUM: tl.constexpr = 4 if FORMAT == "int4" else 2
    W: tl.constexpr = K // NUM if PLANES else K // NUM // 2
    rows, j = tl.arange(0, R), tl.arange(0, W)
    read = tl.load(words + rows[:, None] * W + j[None, :])
    if zeros is None:
        zero = None
    else:
        zero = tl.load(zeros + rows)
    if PLANES:
        if FORMAT == "int4":
            planes = int4_planes(read, zero, None, dtype, OFFSET, False)
        elif FORMAT == "int8":
            planes = int8_planes(read, zero, dtype, False)
        else:
            planes = fp8_planes(read, dtype, False)
        for i in tl.static_range(NUM):
            at = out + rows[:, None] * K + plane_columns(j, i, NUM)[None, :]
            tl.store(at, planes[i].to(tl.float32))
    else:
        if FORMAT == "int4":
            values = unpack_int4(read, zero, dtype, False, RUNS)
        elif FORMAT == "int8":
            values = unpack_int8(read, zero, dtype, False)
        else:
            values = unpack_fp8(read, dtype, False)
        tl.store(out + rows[:, None] * K + tl.arange(0, K)[None, :], values.to(tl.float32))


def unpack(
    words: Tensor,
    form: str,
    planes: bool,
    dtype: object,
    zeros: Tensor | None,
    offset: bool = False,
    runs: int = 1,
) -> Tensor:
    k = words.shape[1] * (8 if form == "int4" else 4)
    out = torch.full((ROWS, k), torch.nan)
    words = words.view(torch.int16) if planes else words
    how = {"FORMAT": form, "PLANES": planes, "OFFSET": offset, "dtype": dtype}
    unpack_kernel[(1,)](words, zeros, out, K=k, R=ROWS, RUNS=runs, **how)
    return out


@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("planes", [False, True])
def test_four_bits_less_zero_are_exact(dtype: object, asymmetric: bool, planes: bool) -> None:
    values = torch.stack([torch.randperm(64) % 16 for _ in range(ROWS)]).to(torch.uint8)
    zeros = torch.arange(float(ROWS)) if asymmetric else None
    out = unpack(pack_nibbles(interleave(values, 4)), "int4", planes, dtype, zeros)
    wanted = values.float() - (8 if zeros is None else zeros[:, None])
    assert torch.equal(out, wanted)
    if planes:
        raised = unpack(pack_nibbles(interleave(values, 4)), "int4", True, dtype, zeros, True)
        assert torch.equal(raised, values.float() + 16)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panels_values_come_by_their_columns(panel: int) -> None:
    """Its planes, each of which is kept in the order of the words, are its quarters."""
    values = torch.stack([torch.randperm(panel) % 16 for _ in range(ROWS)]).to(torch.uint8)
    (words,) = panels(pack_nibbles(values), panel, panel)
    out = unpack(words, "int4", False, tl.float16, None, runs=panel // 32)
    assert torch.equal(out, values.float() - 8)
    planes = unpack(words, "int4", True, tl.float16, None).unflatten(1, (-1, 4, 8))
    assert torch.equal(planes.transpose(1, 2).flatten(1), values.float() - 8)


@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("planes", [False, True])
def test_eight_bits_less_zero_are_exact(dtype: object, asymmetric: bool, planes: bool) -> None:
    values = (torch.stack([torch.randperm(256) for _ in range(ROWS)]) - 128).to(torch.int8)
    zeros = torch.linspace(-128, 127, ROWS).round() if asymmetric else None
    out = unpack(interleave(values, 8).view(torch.int32), "int8", planes, dtype, zeros)
    wanted = values.float() - (0 if zeros is None else zeros[:, None])
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("planes", [False, True])
def test_every_e4m3_number_is_exact(planes: bool) -> None:
    """In float16; the interpreter has no subnormal bfloat16."""
    codes = torch.stack([torch.randperm(256) for _ in range(ROWS)]).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    out = unpack(interleave(codes, 8).view(torch.int32), "fp8", planes, tl.float16, None)
    finite = values.isfinite()
    assert torch.equal(out[finite], values[finite])
    assert (out[~finite].abs() == 480).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_come_back_in_order(bits: int) -> None:
    values = torch.randint(0, 16, (3, 128), dtype=torch.uint8)
    mixed = interleave(values, bits)
    assert not torch.equal(mixed, values)
    assert torch.equal(deinterleave(mixed, bits), values)


def test_nibbles_are_packed_by_rising_bits() -> None:
    values = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8)
    assert pack_nibbles(values).item() & 0xFFFFFFFF == 0xF7654321
