import pytest

from rackmount_registry.axes import AXIS_NAMES, Axis, Cut, Mesh, Solo
from rackmount_registry.errors import ConfigError


def mesh(rank: int, size: int) -> Mesh:
    """Every axis over one group; no collective runs here."""
    return Mesh(groups={name: Solo(rank, size) for name in AXIS_NAMES})


def cuts(axis: Axis | int, size: int) -> list[tuple[int, int]]:
    """Start and stop of each rank's share."""
    return [(c.start, c.stop) for c in (mesh(rank, size).cut(axis) for rank in range(size))]


def test_a_plain_size_is_whole_on_every_rank() -> None:
    assert cuts(10, 4) == [(0, 10)] * 4


def test_an_axis_is_cut_by_whole_units_in_rank_order() -> None:
    assert cuts(Axis("heads", 8, 16), 4) == [(0, 32), (32, 64), (64, 96), (96, 128)]


def test_an_axis_without_a_group_is_whole() -> None:
    only_heads = Mesh(groups={"heads": Solo(1, 2)})
    assert only_heads.cut(Axis("ffn", 6)) == Cut(0, 6)
    assert only_heads.cut(Axis("heads", 6)) == Cut(3, 6)
    assert Mesh().cut(Axis("heads", 6, 2)) == Cut(0, 12)


def test_tensor_parallelism_cuts_everything_but_the_number_of_experts() -> None:
    two = Mesh.tensor_parallel(Solo(1, 2))
    assert {name for name in AXIS_NAMES if two.cut(Axis(name, 4)).size == 4} == {"experts"}


def test_ranks_that_do_not_divide_the_units_are_refused_with_those_that_do() -> None:
    rule = r"^5 ranks do not divide ffn=12; choose one of 1, 2, 3, 4, 6, 12$"
    with pytest.raises(ConfigError, match=rule):
        mesh(0, 5).cut(Axis("ffn", 12, 64))


def test_more_ranks_than_units_share_them_if_the_axis_replicates() -> None:
    assert cuts(Axis("kv_heads", 2, 8, replicate=True), 4) == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert cuts(Axis("kv_heads", 1, 8, replicate=True), 3) == [(0, 8)] * 3
    with pytest.raises(ConfigError, match=r"4 ranks do not divide heads=2; choose one of 1, 2$"):
        mesh(0, 4).cut(Axis("heads", 2, 8))


@pytest.mark.parametrize("size", [3, 6])
def test_ranks_that_can_neither_split_nor_share_units_are_refused(size: int) -> None:
    rule = rf"{size} ranks do not divide kv_heads=4; choose one of 1, 2, 4, or a multiple of 4$"
    with pytest.raises(ConfigError, match=rule):
        mesh(0, size).cut(Axis("kv_heads", 4, 8, replicate=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_every_query_head_meets_its_kv_head_on_its_rank(kv_heads: int, group: int) -> None:
    heads = Axis("heads", kv_heads * group)
    shared = Axis("kv_heads", kv_heads, replicate=True)
    tried = 0
    for size in range(1, heads.count + 1):
        if heads.count % size or (kv_heads % size and size % kv_heads):
            continue
        tried += 1
        for rank in range(size):
            queries, keys = mesh(rank, size).cut(heads), mesh(rank, size).cut(shared)
            # Grouped attention pairs local query i with local key i // (local queries per key).
            per_key = queries.size // keys.size
            for local in range(queries.size):
                assert (queries.start + local) // group == keys.start + local // per_key
    assert tried


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (96, [(0, 24), (24, 48), (48, 72), (72, 96)]),
        (97, [(0, 25), (25, 50), (50, 75), (75, 97)]),
        (5, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (1, [(0, 1), (1, 1), (1, 1), (1, 1)]),
    ],
)
def test_the_vocabulary_may_split_unevenly(count: int, expected: list[tuple[int, int]]) -> None:
    assert cuts(Axis("vocab", count), 4) == expected
    assert cuts(Axis("vocab", count, 3), 4) == [(3 * a, 3 * b) for a, b in expected]


def test_an_axis_name_outside_the_closed_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'head' is not one of heads, kv_heads, ffn, .*vocab"):
        Axis("head", 4)
