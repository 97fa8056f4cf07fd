"""Digests and matches of the prefix cache, without a scheduler."""

from hashlib import sha256

import numpy as np

from rackmount.scheduling.block_pool import BlockPool
from rackmount.scheduling.prefix_cache import PrefixCache
from rackmount.scheduling.request import Request

BLOCK_SIZE = 4


def request_of(*token_ids: int, salt: str | None = None) -> Request:
    return Request(request_id="", prompt_token_ids=token_ids, max_tokens=1, cache_salt=salt)


def computed(cache: PrefixCache, pool: BlockPool, request: Request) -> None:
    """The request's full blocks, held and published."""
    num_blocks = request.prompt_token_ids.size // BLOCK_SIZE
    request.blocks = pool.allocate(num_blocks)
    contents = request.prompt_token_ids[: num_blocks * BLOCK_SIZE].tobytes()
    cache.publish([request] * num_blocks, range(num_blocks), contents)


def num_hits(first: Request, second: Request) -> int:
    """Blocks that `second` finds after `first` was computed."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE)
    computed(cache, pool, first)
    hits = cache.match(second, second.prompt_token_ids)
    assert hits == first.blocks[: len(hits)]
    return len(hits)


def test_a_prompt_that_shares_ten_tokens_hits_two_blocks_of_four() -> None:
    shared = range(10)
    assert num_hits(request_of(*shared, 90, 91, 92), request_of(*shared, 80, 81, 82)) == 2


def test_a_cached_block_aligned_prompt_leaves_its_last_block_to_compute() -> None:
    assert num_hits(request_of(*range(12)), request_of(*range(12))) == 2
    assert num_hits(request_of(*range(12)), request_of(*range(13))) == 3
    assert num_hits(request_of(*range(4)), request_of(*range(4))) == 0


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    assert num_hits(request_of(1, 1, 1, 1, *range(8)), request_of(2, 2, 2, 2, *range(8))) == 0
    assert num_hits(request_of(*range(4), 7, 7, 7, 7), request_of(7, 7, 7, 7, 0)) == 0


def test_other_salts_share_nothing() -> None:
    tokens = range(9)
    assert num_hits(request_of(*tokens, salt="a"), request_of(*tokens, salt="a")) == 2
    assert num_hits(request_of(*tokens, salt="a"), request_of(*tokens, salt="b")) == 0
    assert num_hits(request_of(*tokens), request_of(*tokens, salt="b")) == 0


def test_digests_are_a_sha256_chain_over_little_endian_tokens() -> None:
    pool = BlockPool(8)
    request = request_of(*range(8), salt="tenant")
    computed(PrefixCache(pool, BLOCK_SIZE), pool, request)
    first = sha256(sha256(b"tenant").digest() + np.arange(4, dtype="<i4").tobytes()).digest()
    second = sha256(first + np.arange(4, 8, dtype="<i4").tobytes()).digest()
    assert request.digests == [first, second]
    assert list(pool.cached) == [first, second]


def test_digests_are_computed_no_further_than_the_first_miss() -> None:
    pool = BlockPool(8)
    request = request_of(*range(400))
    assert PrefixCache(pool, BLOCK_SIZE).match(request, request.prompt_token_ids) == []
    assert len(request.digests) == 1
