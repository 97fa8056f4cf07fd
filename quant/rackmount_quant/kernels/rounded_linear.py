"""Products whose input is rounded to the weight's eight bits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rackmount_quant.kernels import tuning
from rackmount_quant.kernels.linear import Prepared, QuantizedLinear
from rackmount_quant.kernels.packed import Packed
from rackmount_quant.kernels.rounding import RoundedRows, Rounding
from rackmount_quant.kernels.tuning import Choose, ChooseRounded, Tiling, Way
from rackmount_registry.formats import Rounded


@dataclass(frozen=True, kw_only=True)
class RoundedProduct:
    """A weight as products of rounded rows take it."""

    rounding: Rounding
    values: Tensor
    """[k, n], columns contiguous: the weight's words, seen as eight bits each."""
    scales: Tensor
    ways: Mapping[str, tuple[Way, ...]]
    """Epilogue -> one for each of `tuning.BUCKETS`."""


class RoundedLinear(QuantizedLinear):
    """Rounds inputs as the weight's scheme does, where there is a product for it (`prepare_many`
    gives a `RoundedProduct`) and the exact one of few rows is slower, or there is none."""

    def __init__(
        self,
        choose: Choose = tuning.choose,
        choose_rounded: ChooseRounded = tuning.choose_rounded,
    ) -> None:
        super().__init__(choose)
        self.choose_rounded = choose_rounded

    def ways(self, packed: Packed) -> Mapping[str, tuple[Way, ...]]:
        """See `RoundedProduct.ways`."""
        return tuning.for_all(self.choose_rounded, packed)

    def _way(self, epilogue: str, prepared: Prepared, num_rows: int) -> Way:
        product: RoundedProduct | None = prepared.many
        if product is None:
            return "exact"
        way: Way = "exact"
        if 0 < num_rows <= tuning.MAX_ROWS:
            way = product.ways[epilogue][tuning.bucket_of(num_rows)]
        none = prepared.tiling(epilogue, num_rows) is None
        return "many" if way == "exact" and none else way

    def _compile(
        self, prepared: Prepared, epilogue: str, like: Tensor, bias: Tensor | None
    ) -> None:
        for rows in tuning.BUCKETS:
            x = like.new_empty(rows, prepared.packed.k)
            way, exact = self._way(epilogue, prepared, rows), prepared.tiling(epilogue, rows)
            if isinstance(way, Tiling):
                rounded = prepared.many.rounding.empty(x)
                self._begin(way, rounded, prepared, epilogue, bias)
            elif way == "exact" and exact is not None:
                self._begin(exact, x, prepared, epilogue, bias)

    def _run(
        self,
        epilogue: str,
        x: Tensor | Rounded,
        prepared: Prepared,
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        way = self._way(epilogue, prepared, len(x))
        if way == "exact" and isinstance(x, Tensor):
            return super()._run(epilogue, x, prepared, bias, residual)
        if not isinstance(way, Tiling):
            return self._run_many(epilogue, x, prepared, bias, residual)
        rounded = self._rounded(x, prepared)
        return self._launch(way, epilogue, rounded, prepared, bias, residual)

    def adds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where the kernel for few rows makes the product, of rounded ones or of others."""
        way = self._way("add", prepared, num_rows)
        return isinstance(way, Tiling) or (way == "exact" and super().adds(prepared, num_rows))

    def multiply(self, x: RoundedRows, product: RoundedProduct, bias: Tensor | None) -> Tensor:
        """The product of rounded rows, at least one, in the dtype of what was rounded."""
        raise NotImplementedError

    def many_rows(self, x: Tensor | Rounded, prepared: Prepared, bias: Tensor | None) -> Tensor:
        product: RoundedProduct | None = prepared.many
        if product is None:
            return super().many_rows(x, prepared, bias)
        rounded = self._rounded(x, prepared)
        if len(rounded) == 0:
            size = (0, prepared.packed.n)
            return torch.empty(size, dtype=rounded.dtype, device=rounded.values.device)
        return self.multiply(rounded, product, bias)

    def _rounded(self, x: Tensor | Rounded, prepared: Prepared) -> RoundedRows:
        if isinstance(x, RoundedRows):
            return x
        assert isinstance(x, Tensor)
        rounding: Rounding = prepared.many.rounding
        return rounding.round(x)

    def rounds(self, prepared: Prepared, num_rows: int) -> bool:
        """Where no product that is asked for is exact."""
        return all(self._way(use, prepared, num_rows) != "exact" for use in prepared.uses)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, prepared: Prepared
    ) -> tuple[Rounded, Tensor]:
        """See `LinearKernel.round_norm`."""
        return prepared.many.rounding.round_norm(x, residual, weight, eps)

    def round_silu_mul(self, gate: Tensor, up: Tensor, prepared: Prepared) -> Rounded:
        """See `LinearKernel.round_silu_mul`."""
        return prepared.many.rounding.round_silu_mul(gate, up)
