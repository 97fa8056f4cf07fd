"""Finds computed blocks by content, so that equal prefixes are computed once.

A block's digest is sha256(digest of the block before it, its token ids as int32 little-endian):
it names the whole prefix. The first block's parent is made from the request's salt. The hash is a
cryptographic one, since a collision would show one user's context to another.
"""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from rackmount.scheduling.block_pool import Block, BlockPool
from rackmount.scheduling.request import Request


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def match(self, request: Request, token_ids: np.ndarray) -> list[Block]:
        """The longest run of cached blocks that `token_ids` begins with, short of its last token.

        One token at least is always computed: the next one is sampled from its logits.
        """
        hits: list[Block] = []
        digests = request.digests
        for index in range((token_ids.size - 1) // self._block_size):
            if index == len(digests):
                content = token_ids[index * self._block_size : (index + 1) * self._block_size]
                digests.append(_digest(request, content.tobytes()))
            block = self._pool.cached.get(digests[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def publish(self, requests: Sequence[Request], indices: Sequence[int], contents: bytes) -> None:
        """Lets block `indices[i]` of `requests[i]` be found, for every i: it is full and computed.

        `contents` are the blocks' token ids end to end, int32 little-endian.
        """
        size = 4 * self._block_size
        for i, (request, index) in enumerate(zip(requests, indices, strict=True)):
            digests = request.digests
            if index == len(digests):
                digests.append(_digest(request, contents[i * size : (i + 1) * size]))
            self._pool.publish(request.blocks[index], digests[index])


def _digest(request: Request, content: bytes) -> bytes:
    """Digest of the block after those that the request's chain has."""
    if request.digests:
        parent = request.digests[-1]
    else:
        parent = sha256((request.cache_salt or "").encode()).digest()
    return sha256(parent + content).digest()
