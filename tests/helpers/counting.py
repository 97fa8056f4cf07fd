"""Operations and a linear kernel that count how often they are called."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from rackmount_backends.torch_linear import DenseLinear
from rackmount_registry.descriptors import LinearKernel
from rackmount_registry.formats import Rounded, Weight
from rackmount_registry.ops import reference_ops


class CountingOps:
    """The reference operations, counted by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(reference_ops(), name)

        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return operation(*args)

        return counted


class CountingKernel(DenseLinear):
    """A kernel with every epilogue, by its definition."""

    def __init__(self, most_added: int = 100) -> None:
        self.most_added = most_added
        self.calls: Counter[str] = Counter()

    def run(self, x: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["run"] += 1
        return super().run(x, prepared, bias)

    def run_silu_mul(self, x: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["silu_mul"] += 1
        return reference_ops().silu_mul(*super().run(x, prepared, bias).chunk(2, -1))

    def adds(self, prepared: Tensor, num_rows: int) -> bool:
        return num_rows <= self.most_added

    def run_add(self, x: Tensor, prepared: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        self.calls["add"] += 1
        return super().run(x, prepared, bias) + residual


class RoundingKernel(CountingKernel):
    """A kernel that takes its input halved, with the scale 2, for `least` rows or more."""

    def __init__(self, least: int = 0, most_added: int = 0) -> None:
        super().__init__(most_added)
        self.least = least
        self.uses: dict[int, tuple[str, ...]] = {}

    def prepare(self, weight: Weight, uses: Collection[str] = ()) -> Tensor:
        prepared = super().prepare(weight, uses)
        self.uses[id(prepared)] = tuple(uses)
        return prepared

    def rounds(self, prepared: Tensor, num_rows: int) -> bool:
        return num_rows >= self.least

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, prepared: Tensor
    ) -> tuple[Rounded, Tensor]:
        self.calls["round_norm"] += 1
        total = x if residual is None else x + residual
        return self._halved(reference_ops().rms_norm(total, weight, eps)), total

    def round_silu_mul(self, gate: Tensor, up: Tensor, prepared: Tensor) -> Rounded:
        self.calls["round_silu_mul"] += 1
        return self._halved(reference_ops().silu_mul(gate, up))

    def _halved(self, x: Tensor) -> Rounded:
        return Rounded(x / 2, torch.tensor(2.0))

    def run(self, x: Tensor | Rounded, prepared: Tensor, bias: Tensor | None) -> Tensor:
        assert "run" in self.uses[id(prepared)], "it was told so"
        if isinstance(x, Rounded):
            self.calls["rounded"] += 1
            x = x.values * x.scales
        return super().run(x, prepared, bias)


def dense_kernel(kernel: DenseLinear, **fusions: tuple[str, ...]) -> dict[str, Any]:
    """`Parts.kernels` of one kernel, with what it can fuse."""
    descriptor = LinearKernel(name="test", factory="a:b", band="vendor", cells=(), **fusions)
    return {"dense": (kernel, descriptor)}
