"""How the tensors of a stored format are cut, fused and bundled, from their named dimensions."""

from collections.abc import Mapping

import pytest
import torch
from tests.helpers.memory import MemoryCheckpoint, draft_module
from tests.helpers.mounting import mount_draft
from torch import Tensor, nn

from rackmount_registry.axes import AXIS_NAMES, Axis, Mesh, Solo
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import Dim, Role, Slot, StoredFormat, Weight
from rackmount_registry.nn import Embedding, Experts, MergedLinear, Routing, SparseMLP
from rackmount_registry.nn.storage import LinearPart, Piece, StoredWeight, fusable, vector

OUT, IN, PART = Dim("out"), Dim("in"), Dim("part")


def mesh(rank: int, size: int) -> Mesh:
    return Mesh(groups={name: Solo(rank, size) for name in AXIS_NAMES})


def stored_as(*slots: Slot) -> StoredFormat:
    """A format of which only the layout matters."""

    def finish(tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int) -> Weight:
        raise AssertionError("never loaded")

    return StoredFormat("test", slots, "dense", finish)


def lay_out(
    dims: tuple[Dim, ...], *parts: LinearPart, rank: int = 0, size: int = 1
) -> tuple[tuple[int, ...], list[Piece]]:
    """Shape and pieces of the one slot of parts side by side."""
    stored = stored_as(Slot("t", dims))
    storage = StoredWeight([parts], stored, mesh(rank, size), stacked=False).storages["t"]
    return storage.shape, list(storage.pieces)


def spans(piece: Piece) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What is read and where it goes, as (start, stop) for each dimension."""
    return [(s.start, s.stop) for s in piece.index], [(s.start, s.stop) for s in piece.where]


HEADS, KV, FFN = Axis("heads", 4, 2), Axis("kv_heads", 2, 2), Axis("ffn", 12)


def test_parts_lie_side_by_side_along_their_rows() -> None:
    q, k = LinearPart("q", HEADS, 6), LinearPart("k", KV, 6)
    shape, (first, second) = lay_out((OUT, IN), q, k, rank=1, size=2)
    assert shape == (6, 6)
    assert (first.name, first.shape) == ("q.t", (8, 6))
    assert spans(first) == ([(4, 8), (0, 6)], [(0, 4), (0, 6)])
    assert (second.name, second.shape) == ("k.t", (4, 6))
    assert spans(second) == ([(2, 4), (0, 6)], [(4, 6), (0, 6)])


def test_a_split_input_cuts_columns() -> None:
    shape, (piece,) = lay_out((OUT, IN), LinearPart("down", 6, FFN), rank=2, size=3)
    assert shape == (6, 4)
    assert piece.shape == (6, 12)
    assert spans(piece) == ([(0, 6), (8, 12)], [(0, 6), (0, 4)])


def test_dimensions_come_in_the_order_of_the_format() -> None:
    shape, (piece,) = lay_out((IN, OUT), LinearPart("w", FFN, 6), rank=1, size=2)
    assert shape == (6, 6)
    assert piece.shape == (6, 12)
    assert spans(piece) == ([(0, 6), (6, 12)], [(0, 6), (0, 6)])
    shape, pieces = lay_out((IN, OUT), LinearPart("a", 5, 6), LinearPart("b", 3, 6))
    assert shape == (6, 8)
    assert [spans(piece)[1] for piece in pieces] == [[(0, 6), (0, 5)], [(0, 6), (5, 8)]]


def test_groups_of_columns_are_cut_with_their_columns() -> None:
    shape, (piece,) = lay_out((OUT, Dim("in", 2)), LinearPart("w", 5, FFN), rank=1, size=2)
    assert shape == (5, 3)
    assert piece.shape == (5, 6)
    assert spans(piece)[0] == [(0, 5), (3, 6)]


def test_a_last_group_may_be_ragged() -> None:
    shape, (piece,) = lay_out((OUT, Dim("in", 5)), LinearPart("w", 5, FFN))
    assert shape == (5, 3)
    assert piece.shape == (5, 3)
    # Over ranks too, if only the last one's share ends inside a group.
    vocab = Axis("vocab", 9)
    shape, (piece,) = lay_out((Dim("out", 5), IN), LinearPart("w", vocab, 2), rank=1, size=2)
    assert shape == (1, 2)
    assert piece.shape == (2, 2)
    assert spans(piece)[0] == [(1, 2), (0, 2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_inside_a_group_is_refused_with_the_numbers(rank: int) -> None:
    rule = r"w: 2 ranks cut its in dimension of 12 at .*, which is not a multiple of 4"
    with pytest.raises(ConfigError, match=rule):
        lay_out((OUT, Dim("in", 4)), LinearPart("w", 5, FFN), rank=rank, size=2)


def test_the_last_group_of_each_part_is_its_own() -> None:
    """Parts of 5 and 3 rows in blocks of 4 have 2 and 1 blocks, not 2 together."""
    shape, pieces = lay_out((Dim("out", 4), IN), LinearPart("a", 5, 6), LinearPart("b", 3, 6))
    assert shape == (3, 6)
    assert [spans(piece)[1][0] for piece in pieces] == [(0, 2), (2, 3)]


def test_each_part_has_its_entry_on_every_rank() -> None:
    parts = LinearPart("q", HEADS, 6), LinearPart("k", KV, 6), LinearPart("v", KV, 6)
    shape, pieces = lay_out((PART,), *parts, rank=1, size=2)
    assert shape == (3,)
    assert [piece.shape for piece in pieces] == [(1,)] * 3
    assert [spans(piece) for piece in pieces] == [([(0, 1)], [(i, i + 1)]) for i in range(3)]


def test_a_fixed_dimension_is_whole_on_every_rank() -> None:
    shape, (piece,) = lay_out((OUT, Dim("fixed", 7)), LinearPart("w", FFN, 6), rank=1, size=2)
    assert shape == (6, 7)
    assert piece.shape == (12, 7)
    assert spans(piece)[0] == [(6, 12), (0, 7)]


def test_a_bundle_has_the_experts_in_front() -> None:
    bundle = [[LinearPart(f"{e}.{p}", FFN, 6) for p in ("gate", "up")] for e in range(3)]
    stored = stored_as(Slot("weight", (OUT, IN)), Slot("scale", (PART,), "float32"))
    weight = StoredWeight(bundle, stored, mesh(1, 2), stacked=True)
    assert (weight.parts, weight.in_features) == ((6, 6), 6)
    assert weight.storages["weight"].shape == (3, 12, 6)
    assert weight.storages["scale"].shape == (3, 2)
    last = weight.storages["weight"].pieces[-1]
    assert last.name == "2.up.weight"
    assert spans(last) == ([(6, 12), (0, 6)], [(2, 3), (6, 12), (0, 6)])
    scale = weight.storages["scale"].pieces[-1]
    assert spans(scale) == ([(0, 1)], [(2, 3), (1, 2)])


def test_bytes_follow_the_model_unless_the_slot_says_otherwise() -> None:
    stored = stored_as(Slot("weight", (OUT, IN), "int8"), Slot("scale", (OUT,), "float32"))
    weight = StoredWeight([[LinearPart("w", 5, 6)]], stored, Mesh(), stacked=False)
    sizes = {name: s.num_bytes(torch.bfloat16) for name, s in weight.storages.items()}
    assert sizes == {"weight": 30, "scale": 20}
    assert vector("norm", 5, Mesh()).num_bytes(torch.bfloat16) == 10


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([Slot("weight", (OUT, IN))], True),
        ([Slot("weight", (IN, OUT))], True),
        ([Slot("weight", (OUT, IN)), Slot("scale", (PART,))], True),
        ([Slot("weight", (OUT, IN)), Slot("g_idx", (IN,))], False),
        ([Slot("weight", (OUT, IN)), Slot("shape", (Dim("fixed", 2),))], False),
        ([Slot("weight", (OUT, IN)), Slot("scale", ())], False),
    ],
)
def test_parts_fuse_where_every_tensor_grows_with_them(slots: list[Slot], expected: bool) -> None:
    assert fusable(stored_as(*slots)) == expected


class ByName:
    """A scheme that stores the weights that `formats` names, and no others."""

    def __init__(self, formats: Mapping[str, StoredFormat]) -> None:
        self.formats = formats

    def format_for(self, name: str, shape: tuple[int, int], role: Role) -> StoredFormat | None:
        return self.formats.get(name)


def ordered(suffix: str) -> StoredFormat:
    """A dense weight that a permutation of its columns comes with: no two can share a matrix."""

    def finish(tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int) -> Weight:
        weight = tensors["weight"][:, tensors["order"]]
        return Weight("dense", {"weight": weight}, parts, in_features)

    order = Slot("order", (IN,), "int64")
    return StoredFormat(suffix, (Slot("weight", (OUT, IN)), order), "dense", finish)


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(Axis("vocab", 11), 6)
        self.abc = MergedLinear(6, {"a": 4, "b": 2, "c": 3}, bias=True)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = self.abc(self.embed(ids))
        return a, b, c


@pytest.mark.parametrize(
    ("names", "num_products"), [((), 1), (("b",), 2), (("a", "c"), 3), (("a", "b", "c"), 3)]
)
def test_formats_that_do_not_fuse_stay_apart_and_parts_keep_their_order(
    names: tuple[str, ...], num_products: int
) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {"embed.weight": torch.eye(11, 6)}
    expected = []
    for name, rows in (("a", 4), ("b", 2), ("c", 3)):
        weight = torch.randn(rows, 6, generator=random)
        bias = torch.randn(rows, generator=random)
        tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
        if name in names:
            tensors[f"{name}.order"] = torch.randperm(6, generator=random)
            weight = weight[:, tensors[f"{name}.order"]]
        expected.append(weight.T + bias)  # the embedding is the identity
    scheme = ByName(dict.fromkeys(names, ordered("ordered")))
    drafted = draft_module(Merged, dtype=torch.float32, scheme=scheme)
    assert len(drafted.model.abc.gemms) == num_products
    reference = mount_draft(drafted, MemoryCheckpoint(tensors))
    for out, rows in zip(reference.hidden(torch.arange(6)), expected, strict=True):
        torch.testing.assert_close(out, rows)


def test_the_experts_of_a_layer_share_one_format() -> None:
    def make() -> nn.Module:
        experts = Experts(6, Axis("experts", 2), Axis("expert_ffn", 4), Routing(top_k=1))
        return nn.Sequential(SparseMLP(experts))

    for name in ("0.experts.1.up_proj", "0.experts.1.down_proj"):
        scheme = ByName({name: stored_as(Slot("weight", (OUT, IN), "int8"))})
        with pytest.raises(
            ConfigError, match=r"^0.experts: the experts .* one format, not dense, test"
        ):
            draft_module(make, scheme=scheme)


def test_a_merged_projection_of_a_split_input_is_refused() -> None:
    def make() -> nn.Module:
        return nn.Sequential(MergedLinear(FFN, {"a": 4, "b": 2}))

    with pytest.raises(ConfigError, match=r"^0: a merged projection .* Linear for each of a, b$"):
        draft_module(make, mesh=mesh(0, 2))
