"""Blocks: conservation, order of use, names."""

import pytest
from tests.helpers.scheduling import assert_pool_conserved

from rackmount.scheduling.block_pool import Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def published(pool: BlockPool, *names: bytes) -> list[Block]:
    """A sequence of held blocks with these names."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    return blocks


def test_all_blocks_can_be_taken_and_come_back() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(3), pool.allocate(2)
    assert sorted(ids(first + second)) == [0, 1, 2, 3, 4]
    assert not pool.can_allocate(1) and pool.usage == 1
    assert_pool_conserved(pool)
    pool.free(first)
    pool.free(second)
    assert pool.num_free == 5 and pool.usage == 0
    assert_pool_conserved(pool)


def test_more_blocks_than_are_free_are_not_given() -> None:
    pool = BlockPool(2)
    assert pool.can_allocate(2) and not pool.can_allocate(3)
    with pytest.raises(AssertionError, match="3 blocks of 2"):
        pool.allocate(3)


def test_a_freed_block_keeps_its_name_until_it_is_used_again() -> None:
    pool = BlockPool(2)
    (block,) = published(pool, b"a")
    pool.free([block])
    assert pool.cached == {b"a": block}
    assert_pool_conserved(pool)
    pool.allocate(2)
    assert pool.cached == {} and block.digest is None
    assert_pool_conserved(pool)


def test_blocks_without_a_name_are_used_before_cached_ones() -> None:
    pool = BlockPool(4)
    named, unnamed = published(pool, b"a", b"b"), pool.allocate(2)
    pool.free(named)
    pool.free(unnamed)
    assert sorted(ids(pool.allocate(2))) == sorted(ids(unnamed))
    assert set(pool.cached) == {b"a", b"b"}


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4)
    older, newer = published(pool, b"a1", b"a2"), published(pool, b"b1", b"b2")
    pool.free(older)
    pool.free(newer)
    lost = [ids(pool.allocate(1))[0] for _ in range(4)]
    assert lost == ids([older[1], older[0], newer[1], newer[0]])


def test_a_hit_takes_a_block_off_the_free_list() -> None:
    pool = BlockPool(3)
    blocks = published(pool, b"a", b"b")
    pool.free(blocks)
    pool.touch(blocks[:1])
    assert pool.num_free == 2
    assert_pool_conserved(pool)
    assert blocks[0].block_id not in ids(pool.allocate(2))
    assert pool.cached == {b"a": blocks[0]}


def test_a_shared_block_is_free_only_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    blocks = published(pool, b"a")
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2
    assert_pool_conserved(pool)


def test_the_first_of_two_equal_blocks_keeps_the_name() -> None:
    pool = BlockPool(2)
    first, second = published(pool, b"a", b"a")
    assert pool.cached == {b"a": first} and second.digest is None
    pool.free([first, second])
    assert_pool_conserved(pool)


def test_all_names_can_be_forgotten_those_of_held_blocks_too() -> None:
    pool = BlockPool(3)
    held, free = published(pool, b"a"), published(pool, b"b")
    pool.free(free)
    assert pool.forget_all() == 2
    assert pool.cached == {} and held[0].digest is None
    assert_pool_conserved(pool)
    assert pool.forget_all() == 0
