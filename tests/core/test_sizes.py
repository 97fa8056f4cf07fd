"""Which steps are captured."""

import pytest

from rackmount.execution.sizes import decode_sizes, mixed_sizes


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12, 20, 33, 64, 100, 256, 300, 512, 1000, 4096])
def test_every_batch_size_has_a_graph_and_little_padding(limit: int) -> None:
    sizes = decode_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit
    for batch in range(1, limit + 1):
        graph = next(size for size in sizes if size >= batch)
        assert graph - batch < 8 if batch <= 32 else graph - batch <= graph / 5


@pytest.mark.parametrize("limit", [1, 16, 100, 256, 512, 1000, 2048])
def test_every_number_of_tokens_has_a_graph(limit: int) -> None:
    sizes = mixed_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit
    for count in range(1, limit + 1):
        graph = next(size for size in sizes if size >= count)
        assert graph - count < max(16, graph / 2 if count <= 256 else graph / 4)
