"""Hidden states of the wanted tokens are those that a forward of all gives, and cost no more than
they must."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import random_ids, tiny_checkpoint
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import Reference, chosen_parts, mount_draft, mount_reference
from tests.helpers.ranks import ThreadGroup
from torch import Tensor, nn

from rackmount_registry.axes import Mesh
from rackmount_registry.nn import (
    Attention,
    Axis,
    Embedding,
    GatedMLP,
    Linear,
    MergedLinear,
    Norm,
    Param,
)
from rackmount_registry.nn.socket import Binding, Socket
from rackmount_registry.ops import reference_ops
from rackmount_registry.step import wanted_rows

HIDDEN, VOCAB, LENGTHS = 8, 11, (5, 1, 3)
IDS = [random_ids(length, VOCAB, seed=length) for length in LENGTHS]
WANTED = [[4, 5, 8], [], [8, 0, 0], list(range(9))]


class Reversed(Socket):
    """A socket that does not say that it goes by rows, and does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


class Placed(Socket):
    """A socket that reads the step by row."""

    by_row = True

    def bind(self, binding: Binding) -> None:
        self.step = binding.step

    def forward(self, x: Tensor) -> Tensor:
        places = self.step.positions
        return x * (1 + (wanted_rows(self.step, places) if self.cut else places))[:, None]


class OneLayer(nn.Module):
    """Sockets for the models below, whose forward is all that differs."""

    def __init__(self) -> None:
        super().__init__()
        heads, kv_heads = Axis("heads", 2, 4), Axis("kv_heads", 2, 4)
        self.embed = Embedding(Axis("vocab", VOCAB), HIDDEN)
        self.qkv = MergedLinear(HIDDEN, {"q": heads, "k": kv_heads, "v": kv_heads})
        self.attn = Attention(heads, kv_heads, rope=None)
        self.o_proj = Linear(heads, HIDDEN)
        self.norm, self.mlp_norm, self.last_norm = (Norm(HIDDEN, 1e-2) for _ in range(3))
        self.mlp = GatedMLP(HIDDEN, Axis("ffn", 12))
        self.shift = Param(HIDDEN)
        self.reversed, self.placed = Reversed(), Placed()

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))
        return self.o_proj(self.attn(q, k, v))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.end(x, x + self.attended(x))

    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last_norm(y + self.mlp(self.mlp_norm(y)))


class ReadsTheFirstLayer(OneLayer):
    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last_norm(y * (x - self.shift()) + 2.5)


class EndsInAttention(OneLayer):
    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return y


class WithoutAttention(OneLayer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.last_norm(x + self.mlp(x))


class SumOverTokens(OneLayer):
    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last_norm(y * y.sum(0))


class SumFromBefore(OneLayer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total = x.sum(0)
        return self.last_norm(self.attended(x) * total)


class PartsFromBefore(OneLayer):
    def forward(self, ids: Tensor) -> Tensor:
        parts = self.qkv(self.embed(ids))
        return self.o_proj(self.attn(parts[0], parts[1], parts[2])) + self.o_proj(parts[1])


class UnknownSocketBehind(OneLayer):
    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last_norm(self.mlp(self.reversed(y)) + y)


class UnknownThenAttention(OneLayer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.last_norm(self.attended(x.flip(0)))


class ReadsPlaces(OneLayer):
    def end(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last_norm(self.mlp(self.placed(y)))


class ReadsPlacesFirst(OneLayer):
    def forward(self, ids: Tensor) -> Tensor:
        return self.last_norm(self.attended(self.placed(self.embed(ids))))


class ReadsPlacesTwice(OneLayer):
    def forward(self, ids: Tensor) -> Tensor:
        return self.last_norm(self.placed(self.attended(self.placed(self.embed(ids)))))


LAST_NORM: dict[type[OneLayer], bool] = {
    OneLayer: True,
    ReadsTheFirstLayer: True,
    EndsInAttention: False,
    WithoutAttention: True,
    SumOverTokens: False,
    SumFromBefore: False,
    PartsFromBefore: False,
    UnknownSocketBehind: True,
    UnknownThenAttention: True,
    ReadsPlaces: True,
    ReadsPlacesFirst: True,
    ReadsPlacesTwice: False,
}
"""Model -> whether its last norm may be left to the wanted rows."""


class NormedRows:
    """The reference operations; counts the rows of each norm."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(reference_ops(), name)

        def counted(x: Tensor, *args: Any) -> Any:
            if name.endswith("rms_norm"):
                self.rows.append(len(x))
            return operation(x, *args)

        return counted


def mount(make: type[OneLayer], ops: NormedRows, mesh: Mesh | None = None) -> Reference:
    drafted = draft_module(make, mesh=mesh)
    parts = replace(chosen_parts(drafted), ops=ops)
    whole = MemoryCheckpoint(random_tensors(draft_module(make)))
    return mount_draft(drafted, whole, parts=parts)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("make", LAST_NORM)
def test_wanted_rows_are_those_of_the_whole(make: type[OneLayer], wanted: list[int]) -> None:
    ops = NormedRows()
    one = mount(make, ops)
    whole = one.hidden(*IDS)
    assert whole.std() > 0.1
    ops.rows.clear()
    one.step.wanted = torch.tensor(wanted, dtype=torch.int32)
    torch.testing.assert_close(one.hidden(*IDS), whole[wanted], rtol=0, atol=1e-12)
    if make not in (EndsInAttention, PartsFromBefore):
        assert ops.rows[-1] == (len(wanted) if LAST_NORM[make] else sum(LENGTHS))


@pytest.mark.parametrize("make", LAST_NORM)
def test_wanted_rows_of_two_ranks_are_those_of_one(make: type[OneLayer]) -> None:
    whole = mount(make, NormedRows()).hidden(*IDS)
    group = ThreadGroup(2)
    ranks = [mount(make, NormedRows(), Mesh.tensor_parallel(each)) for each in group.members]
    for rank in ranks:
        rank.step.wanted = torch.tensor(WANTED[0])
    for hidden in group.run(lambda rank: ranks[rank].hidden(*IDS)):
        torch.testing.assert_close(hidden, whole[WANTED[0]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_a_decoder_s_last_layer_is_of_the_wanted_rows_alone(tmp_path: Path, family: str) -> None:
    folder, _ = tiny_checkpoint(tmp_path, family, num_hidden_layers=3)
    drafted = mount_reference(folder).mounted.draft
    ops = NormedRows()
    one = mount_reference(folder, parts=replace(chosen_parts(drafted), ops=ops))
    whole = one.hidden(*IDS)
    ops.rows.clear()
    one.step.wanted = torch.tensor([4, 8])
    torch.testing.assert_close(one.hidden(*IDS), whole[[4, 8]], rtol=0, atol=1e-5)
    assert ops.rows == [9, 9, 9, 9, 9, 2, 2]
