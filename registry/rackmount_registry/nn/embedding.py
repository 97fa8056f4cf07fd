"""Token embedding and output head, split over the vocabulary."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rackmount_registry.axes import Axis, size_of
from rackmount_registry.formats import DENSE
from rackmount_registry.nn.linear import Gemm, GemmSocket
from rackmount_registry.nn.socket import Binding, Socket, Survey, splitting
from rackmount_registry.nn.storage import LinearPart, Storage, StoredWeight
from rackmount_registry.ops import prepare


class Embedding(Socket):
    """ids int64 [T] -> rows [T, size]."""

    uses = frozenset({"embedding"})
    by_row = True

    def __init__(self, vocab: Axis, size: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.size = size

    def survey(self, survey: Survey) -> None:
        part = LinearPart(self.path, self.vocab, self.size)
        self.table = StoredWeight([[part]], DENSE, survey.mesh, stacked=False)
        self.first = survey.mesh.cut(self.vocab).start
        self.pending = splitting(survey.mesh, self.vocab)

    def bind(self, binding: Binding) -> None:
        self.ops = binding.ops

    def storages(self) -> Iterator[Storage]:
        return iter(self.table.storages.values())

    def finish(self) -> None:
        weight = self._weight
        ids = torch.zeros(1, dtype=torch.int32, device=weight.device)
        prepare(self.ops.embedding, ids, weight, self.first)

    @property
    def _weight(self) -> Tensor:
        return self.table.storages["weight"].tensor

    def forward(self, ids: Tensor) -> Tensor:
        return self.reduced(self.ops.embedding(ids, self._weight, self.first))


class OutputHead(GemmSocket):
    """Hidden rows [R, size] -> logits [R, vocabulary], whole on every rank.

    Args:
        tied: the embedding whose table it shares. A checkpoint that stores a head of its own all
            the same keeps it, if
            it differs: `untie` is what the loader calls then.
    """

    def __init__(
        self, size: int, vocab: Axis, *, tied: Embedding | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.size = size
        self.vocab = vocab
        # In a tuple, so that it is no submodule here.
        self.tied = (tied,) if tied is not None else ()
        self.bias = bias

    def survey(self, survey: Survey) -> None:
        part = LinearPart(self.path, self.vocab, self.size, role="head")
        stored = DENSE if self.tied else survey.format_of(part.name, part.shape, part.role)
        self.gemm = Gemm([0], [part], stored, survey, self.bias)
        self.gemms = [self.gemm]
        self.group = survey.mesh.group(self.vocab)
        # An uneven vocabulary leaves the last ranks fewer rows; all gather as many.
        most = -(-self.vocab.count // self.group.size) * self.vocab.width
        self.padding = most - sum(self.gemm.sizes)

    @property
    def weight_name(self) -> str:
        """Checkpoint name of the head's own weight."""
        return f"{self.path}.weight"

    def untie(self) -> None:
        """Stores its own weight from now on."""
        self.tied = ()

    def storages(self) -> Iterator[Storage]:
        if not self.tied:
            yield from self.gemm.weight.storages.values()
        if self.gemm.bias is not None:
            yield self.gemm.bias

    def answers_for(self) -> Iterator[str]:
        if self.tied:
            yield self.weight_name

    def finish(self) -> None:
        for embedding in self.tied:
            self.gemm.weight.storages = embedding.table.storages
        super().finish()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gemm(x)
        if self.group.size == 1:
            return logits
        padded = torch.nn.functional.pad(logits, (0, self.padding))
        return self.group.all_gather(padded)[..., : size_of(self.vocab)]
