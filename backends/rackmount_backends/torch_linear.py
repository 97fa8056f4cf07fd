"""Linear kernels in plain torch."""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from rackmount_registry.formats import Weight


class DenseLinear:
    """The product that torch makes of a dense weight."""

    def prepare(self, weight: Weight, uses: Collection[str] = ()) -> Tensor:
        """The matrix [out, in]: the tensor itself; in float32 on a CPU it lies by columns from now
        on."""
        dense = weight.tensors["weight"]
        if dense.device.type == "cpu" and dense.dtype == torch.float32:
            # A fifth of the time of a decoding step: MKL is slow on few rows times a transposed
            # matrix. The new memory takes the old one's place, so that no weight is held twice.
            dense.data = dense.t().contiguous().t()
        return dense

    def run(self, x: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return F.linear(x, prepared, bias)


class DequantizedLinear:
    """The definition of a quantized product: dequantize, multiply in the wider of the two dtypes,
    round once."""

    def prepare(self, weight: Weight, uses: Collection[str] = ()) -> Weight:
        """The weight as loaded."""
        return weight

    def run(self, x: Tensor, prepared: Weight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out] in the dtype of x."""
        dense = prepared.dequantize()
        wide = torch.promote_types(x.dtype, dense.dtype)
        bias = bias if bias is None else bias.to(wide)
        return F.linear(x.to(wide), dense.to(wide), bias).to(x.dtype)
