"""Linear kernel "triton-fp8": e4m3 weights, with a scale a row or a block of 128 x 128."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_quant.kernels.packed import Packed, pack_blocks, pack_rows
from rackmount_quant.kernels.rounded_linear import RoundedLinear, RoundedProduct
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_registry.formats import BLOCK, Weight

FP8_PRODUCTS = (8, 9)
"""Least compute capability that multiplies e4m3."""
BLOCK_PRODUCTS = (9, 0)
"""The one for which cuBLAS multiplies blocks with scales of their own."""


class Fp8Linear(RoundedLinear):
    """For "fp8_rows" and "fp8_blocks".

    Many rows are rounded as the scheme says, and multiplied by CUTLASS or cuBLAS through torch; few
    by `few_rows_kernel`, rounded where that is faster than exact. With a scale a row both add up as
    the tensor cores do, which on Hopper keeps some 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2); with blocks no sum is longer than 128 columns, or cuBLAS sees to it. CUTLASS and
    cuBLAS write bfloat16, the one dtype that CUTLASS has for rows: where x is float16, the bias and
    the result are rounded to it first, three bits shorter. Where there is no such product the
    weight is dequantized and the input left as it is, which is more exact.
    """

    def pack(self, weight: Weight) -> Packed:
        return pack_rows(weight) if weight.format == "fp8_rows" else pack_blocks(weight)

    def prepare_many(self, weight: Weight, packed: Packed) -> RoundedProduct | None:
        device = packed.words.device
        fits = packed.n % 16 == 0 and packed.k % 16 == 0 and device.type == "cuda"
        if weight.activation == "plain" or not fits:
            return None
        capability = torch.cuda.get_device_capability(device)
        by_blocks = packed.rows_per_scale == BLOCK and packed.n % BLOCK == packed.k % BLOCK == 0
        if packed.group == 0 and weight.activation in ("token", "tensor"):
            exists = capability >= FP8_PRODUCTS
            scales = packed.scales.view(1, -1)
        else:
            exists = by_blocks and weight.activation == "group" and capability == BLOCK_PRODUCTS
            # [columns / 128 rounded up to 4, rows / 128], columns contiguous.
            scales = F.pad(packed.scales, (0, -packed.scales.shape[1] % 4)).contiguous().t()
        if not exists:
            return None
        rounding = Rounding(
            dtype=torch.float8_e4m3fn,
            per=weight.activation,
            given=weight.tensors.get("input_scale"),
        )
        values = packed.words.view(torch.float8_e4m3fn).t()
        return RoundedProduct(
            rounding=rounding, values=values, scales=scales, ways=self.ways(packed)
        )

    def multiply(self, x: RoundedRows, product: RoundedProduct, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(torch.bfloat16)
        if product.rounding.per == "group":
            out = F.scaled_mm(
                x.values,
                product.values,
                x.scales,
                F.ScalingType.BlockWise1x128,
                product.scales,
                F.ScalingType.BlockWise128x128,
                output_dtype=torch.bfloat16,
            )
            out = out if bias is None else out + bias
        else:
            out = torch._scaled_mm(
                x.values,
                product.values,
                x.scales,
                product.scales,
                bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        return out[: len(x)].to(x.dtype)
