"""Which steps are captured."""

import pytest

from rackmount.execution.sizes import decode_sizes


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12, 20, 33, 64, 100, 256, 300, 512, 1000, 4096])
def test_every_batch_size_has_a_graph_and_little_padding(limit: int) -> None:
    sizes = decode_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit
    for batch in range(1, limit + 1):
        graph = next(size for size in sizes if size >= batch)
        assert graph - batch < 8 if batch <= 32 else graph - batch <= graph / 5
