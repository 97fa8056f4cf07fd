"""A learned tensor that no other socket holds."""

from collections.abc import Iterator

from torch import Tensor

from rackmount_registry.axes import Axis
from rackmount_registry.nn.socket import Socket, Survey
from rackmount_registry.nn.storage import Storage, vector


class Param(Socket):
    """A vector of the checkpoint, named like the socket itself: `self.scale = Param(dim)`, used as
    `self.scale()`."""

    def __init__(self, extent: int | Axis) -> None:
        super().__init__()
        self.extent = extent

    def survey(self, survey: Survey) -> None:
        self.storage = vector(self.path, self.extent, survey.mesh)

    def storages(self) -> Iterator[Storage]:
        yield self.storage

    def forward(self) -> Tensor:
        return self.storage.tensor
