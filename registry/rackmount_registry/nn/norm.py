"""Root-mean-square norm."""

from collections.abc import Iterator

from torch import Tensor

from rackmount_registry.formats import Rounded
from rackmount_registry.nn.linear import Gemm
from rackmount_registry.nn.socket import Binding, Socket, Survey
from rackmount_registry.nn.storage import Storage, vector
from rackmount_registry.ops import prepare


class Norm(Socket):
    """RMSNorm over `size` features that never split: x [T, size] -> the same."""

    uses = frozenset({"rms_norm", "add_rms_norm"})
    by_row = True
    reader: Gemm | None = None
    """The product that alone reads the result, and can round it; set by the mount."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps

    def survey(self, survey: Survey) -> None:
        self.scale = vector(f"{self.path}.weight", self.size, survey.mesh)

    def bind(self, binding: Binding) -> None:
        self.ops = binding.ops

    def storages(self) -> Iterator[Storage]:
        yield self.scale

    def finish(self) -> None:
        weight = self.scale.tensor
        x = weight.unsqueeze(0)  # as a token's features are
        prepare(self.ops.rms_norm, x, weight, self.eps)
        prepare(self.ops.add_rms_norm, x, x, weight, self.eps)

    def forward(self, x: Tensor) -> Tensor | Rounded:
        return self.of(x, self.reader)

    def of(self, x: Tensor, reader: Gemm | None) -> Tensor | Rounded:
        """The norm of x, made for the product `reader` where it can be rounded for that."""
        if reader is not None and reader.rounds(len(x)):
            return reader.round_norm(x, None, self.scale.tensor, self.eps)[0]
        return self.ops.rms_norm(x, self.scale.tensor, self.eps)

    def of_sum(
        self, x: Tensor, residual: Tensor, reader: Gemm | None
    ) -> tuple[Tensor | Rounded, Tensor]:
        """(the norm of x + residual, made as in `of`, and the sum)."""
        if reader is not None and reader.rounds(len(x)):
            return reader.round_norm(x, residual, self.scale.tensor, self.eps)
        return self.ops.add_rms_norm(x, residual, self.scale.tensor, self.eps)
