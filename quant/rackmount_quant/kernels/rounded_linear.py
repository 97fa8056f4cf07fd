"""Products whose input is rounded to the weight's eight bits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_quant.kernels.tuning import Choose, Tiling
from rackmount_registry.formats import Rounded


@dataclass(frozen=True, kw_only=True)
class RoundedProduct:
    """A weight as products of rounded rows take it."""

    rounding: Rounding
    values: Tensor
    """[k, n], columns contiguous: the weight's words, seen as eight bits each."""
    scales: Tensor
    tilings: Mapping[str, tuple[Tiling | None, ...]]
    """As `Prepared.tilings`: how few rows are multiplied, in the kernel that takes other inputs,
    too."""

    def tiling(self, epilogue: str, rows: int) -> Tiling | None:
        return tuning.of_rows(self.tilings[epilogue], rows)


class RoundedLinear(QuantizedLinear):
    """Rounds the input where the weight's scheme does, there is a product for it, and the exact one
    of few rows is slower: where `prepare_many` gives a `RoundedProduct`."""

    def __init__(
        self, choose: Choose = tuning.choose, choose_rounded: Choose = tuning.choose_rounded
    ) -> None:
        super().__init__(choose)
        self.choose_rounded = choose_rounded

    def tilings(self, packed: Packed) -> Mapping[str, tuple[Tiling | None, ...]]:
        """Of rounded rows."""
        return tuning.for_all(self.choose_rounded, packed)

    def _compile(
        self, prepared: Prepared, epilogue: str, like: Tensor, bias: Tensor | None
    ) -> None:
        super()._compile(prepared, epilogue, like, bias)
        product: RoundedProduct | None = prepared.many
        if product is None:
            return
        exact = prepared.tilings[epilogue]
        for rows, tiling, other in zip(
            tuning.BUCKETS, product.tilings[epilogue], exact, strict=True
        ):
            if tiling is not None and other is None:
                x = product.rounding.empty(like.new_empty(rows, prepared.packed.k))
                self._begin(tiling, x, prepared, epilogue, bias)

    def _run(
        self,
        epilogue: str,
        x: Tensor | Rounded,
        prepared: Prepared,
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        product: RoundedProduct | None = prepared.many
        rounds = isinstance(x, Rounded) or prepared.tiling(epilogue, len(x)) is None
        tiling = None if product is None else product.tiling(epilogue, len(x))
        if product is None or tiling is None or not rounds:
            return super()._run(epilogue, x, prepared, bias, residual)
        if not isinstance(x, RoundedRows):
            assert isinstance(x, Tensor)
            x = product.rounding.round(x)
        return self._launch(tiling, epilogue, x, prepared, bias, residual)

    def adds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where few rows are multiplied, rounded or not."""
        product: RoundedProduct | None = prepared.many
        rounded = product is not None and product.tiling("add", num_rows) is not None
        return rounded or super().adds(prepared, num_rows)

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
        """Where rows are multiplied that are rounded for it."""
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
