"""Linear kernel "deepgemm"."""

from collections.abc import Collection

import torch
from torch import Tensor

from rackmount_deepgemm.rounding import round_groups
from rackmount_deepgemm.weights import values_and_scales
from rackmount_registry.formats import Weight


class DeepGemmLinear:
    """See `rackmount_registry.formats.LinearKernel`. The input is rounded to FP8 with a scale for
    each token and 128 columns; sums are promoted to float32 every 128 columns."""

    def prepare(self, weight: Weight, uses: Collection[str] = ()) -> tuple[Tensor, Tensor]:
        """Values and scales as loaded.

        Raises:
            ConfigError: see `values_and_scales`.
        """
        return values_and_scales(weight)

    def run(self, x: Tensor, prepared: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        import deep_gemm

        out = torch.empty(len(x), len(prepared[0]), dtype=x.dtype, device=x.device)
        if len(x):
            deep_gemm.fp8_gemm_nt(round_groups(x), prepared, out)
        return out if bias is None else out.add_(bias)
