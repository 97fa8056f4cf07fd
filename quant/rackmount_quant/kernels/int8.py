"""Linear kernel "triton-int8": int8 weights with a scale a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rackmount_quant.kernels.packed import Packed, pack_rows
from rackmount_quant.kernels.rounded_linear import RoundedLinear, RoundedProduct
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_registry.device.launch import launch_options
from rackmount_registry.formats import Weight

ROWS_BY = 32
"""Fewer than 17 are refused by the product."""
COLUMNS = 1024


class Int8Linear(RoundedLinear):
    """For "int8_rows". Many rows are rounded where the scheme rounds inputs, and few where that is
    faster; both are then multiplied in integers, exactly."""

    def pack(self, weight: Weight) -> Packed:
        return pack_rows(weight)

    def prepare_many(self, weight: Weight, packed: Packed) -> RoundedProduct | None:
        fits = packed.n % 16 == 0 and packed.k % 16 == 0
        if weight.activation not in ("token", "tensor") or not fits:
            return None
        given = weight.tensors.get("input_scale")
        rounding = Rounding(dtype=torch.int8, per=weight.activation, given=given, rows_by=ROWS_BY)
        values = packed.words.view(torch.int8).t()
        return RoundedProduct(
            rounding=rounding, values=values, scales=packed.scales, ways=self.ways(packed)
        )

    def multiply(self, x: RoundedRows, product: RoundedProduct, bias: Tensor | None) -> Tensor:
        sums = torch._int_mm(x.values, product.values)
        rows, n = len(x), sums.shape[1]
        out = torch.empty((rows, n), dtype=x.dtype, device=sums.device)
        scale_kernel[(rows, triton.cdiv(n, COLUMNS))](
            sums,
            x.scales,
            product.scales,
            bias,
            out,
            n,
            BLOCK=COLUMNS,
            num_warps=4,
            **launch_options(out.device),
        )
        return out


@triton.jit
def scale_kernel(
    sums, row_scales, column_scales, bias, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """sums int32 [T, N] times a scale a row and one a column, plus the bias -> out [T, N]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    value = tl.load(sums + row * N + columns, mask=inside, other=0).to(tl.float32)
    value *= tl.load(row_scales + row) * tl.load(column_scales + columns, mask=inside, other=0.0)
    if bias is not None:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, value.to(out.dtype.element_ty), mask=inside)
