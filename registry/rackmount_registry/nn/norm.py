"""Root-mean-square norm."""

from collections.abc import Iterator

from torch import Tensor

from rackmount_registry.nn.socket import Binding, Socket, Survey
from rackmount_registry.nn.storage import Storage, vector


class Norm(Socket):
    """RMSNorm over `size` features that never split: x [T, size] -> the same."""

    uses = frozenset({"rms_norm", "add_rms_norm"})

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

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.scale.tensor, self.eps)
