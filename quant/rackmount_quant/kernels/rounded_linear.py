"""Products of many rows whose input is rounded to the weight's eight bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_registry.formats import Rounded


@dataclass(frozen=True, kw_only=True)
class RoundedProduct:
    """A weight as the product of many rounded rows takes it."""

    rounding: Rounding
    values: Tensor
    """[k, n], columns contiguous: the weight's words, seen as eight bits each."""
    scales: Tensor


class RoundedLinear(QuantizedLinear):
    """Rounds the input of many rows where the weight's scheme does and there is a product for it:
    where `prepare_many` gives a `RoundedProduct`."""

    def multiply(self, x: RoundedRows, product: RoundedProduct, bias: Tensor | None) -> Tensor:
        """The product of rounded rows, at least one, in the dtype of what was rounded."""
        raise NotImplementedError

    def many_rows(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        product: RoundedProduct | None = prepared.many
        if product is None:
            return super().many_rows(x, prepared, bias)
        if not isinstance(x, RoundedRows):
            assert isinstance(x, Tensor)
            x = product.rounding.round(x)
        if len(x) == 0:
            return torch.empty((0, prepared.packed.n), dtype=x.dtype, device=x.values.device)
        return self.multiply(x, product, bias)

    def rounds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where many rows are multiplied, and rounded for it."""
        if prepared.many is None:
            return False
        return all(prepared.tiling(epilogue, num_rows) is None for epilogue in prepared.uses)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, prepared: Prepared
    ) -> tuple[Rounded, Tensor]:
        """See `LinearKernel.round_norm`."""
        return prepared.many.rounding.round_norm(x, residual, weight, eps)

    def round_silu_mul(self, gate: Tensor, up: Tensor, prepared: Prepared) -> Rounded:
        """See `LinearKernel.round_silu_mul`."""
        return prepared.many.rounding.round_silu_mul(gate, up)
