"""Operations and a linear kernel that count how often they are called."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rackmount_backends.torch_linear import DenseLinear
from rackmount_registry.descriptors import LinearKernel
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


def dense_kernel(kernel: DenseLinear, **fusions: tuple[str, ...]) -> dict[str, Any]:
    """`Parts.kernels` of one kernel, with what it can fuse."""
    descriptor = LinearKernel(name="test", factory="a:b", band="vendor", cells=(), **fusions)
    return {"dense": (kernel, descriptor)}
