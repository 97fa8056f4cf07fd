import torch
from tests.helpers.memory import MemoryCheckpoint, draft_module
from tests.helpers.mounting import Reference, mount_draft
from torch import Tensor, nn

from rackmount_registry.axes import Axis, Mesh, Solo
from rackmount_registry.nn import Embedding, Linear, Param

VOCAB, HIDDEN = 5, 4
FFN = Axis("ffn", 6)
IDS = torch.arange(VOCAB)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Param(FFN)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


class Scaled(nn.Module):
    """A learned vector over a split axis, used as the textbook would."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(Axis("vocab", VOCAB), HIDDEN)
        self.up = Linear(HIDDEN, FFN)
        self.inner = Inner()
        self.shift = Param(FFN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.up(self.embed(ids))) + self.shift()


TENSORS = {
    "embed.weight": torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)),
    "up.weight": torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1)),
    "inner.scale": torch.arange(1.0, 7.0),
    "shift": torch.arange(10.0, 70.0, 10.0),
}
EXPECTED = (TENSORS["embed.weight"] @ TENSORS["up.weight"].T) * TENSORS["inner.scale"] + TENSORS[
    "shift"
]


def mount(mesh: Mesh | None = None) -> Reference:
    drafted = draft_module(Scaled, dtype=torch.float32, mesh=mesh)
    return mount_draft(drafted, MemoryCheckpoint(TENSORS))


def test_a_param_is_stored_under_its_own_path_and_called_for_its_value() -> None:
    torch.testing.assert_close(mount().hidden(IDS), EXPECTED)


def test_a_param_over_an_axis_is_cut_with_it() -> None:
    for rank in range(3):
        only_ffn = Mesh(groups={"ffn": Solo(rank, 3)})
        out = mount(only_ffn).hidden(IDS)
        torch.testing.assert_close(out, EXPECTED[:, 2 * rank : 2 * rank + 2])


def test_each_model_has_its_own_values() -> None:
    first, second = mount(), mount()
    first.mounted.draft.model.shift().zero_()
    assert not torch.equal(first.hidden(IDS), second.hidden(IDS))
