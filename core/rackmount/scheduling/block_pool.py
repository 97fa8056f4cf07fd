"""The KV cache's blocks: who holds them, and in which order free ones are used again."""

from collections.abc import Sequence


class Block:
    """`block_size` slots of the KV cache, and a link of the free list while nobody holds it."""

    __slots__ = ("block_id", "digest", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None
        """Names the content, computed and complete; None while nobody may share it."""
        self.prev = self
        self.next = self


class BlockPool:
    """All blocks, made once. A freed block keeps its content and its name until it is used again.

    The free list is a ring through one more block, its ends. Blocks leave at the front: first those
    without a name, which hold nothing to keep, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_free = num_blocks
        self.cached: dict[bytes, Block] = {}
        """Named blocks, held or free."""
        self._ends = Block(-1)
        for block in self.blocks:
            self._link(block, self._ends.prev)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_free / len(self.blocks)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[Block]:
        """Takes blocks from the front of the free list; their names are forgotten."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks of {self.num_free} free ones"
        blocks = []
        block = self._ends.next
        for _ in range(num_blocks):
            self._forget(block)
            block.ref_count = 1
            blocks.append(block)
            block = block.next
        self._ends.next = block
        block.prev = self._ends
        self.num_free -= num_blocks
        return blocks

    def touch(self, blocks: Sequence[Block]) -> None:
        """One more holder for each block, taken off the free list where it was free."""
        for block in blocks:
            if not block.ref_count:
                block.prev.next, block.next.prev = block.next, block.prev
                self.num_free -= 1
            block.ref_count += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """One holder less for each of a sequence's blocks, deepest first: prefixes last longest."""
        for block in reversed(blocks):
            block.ref_count -= 1
            if not block.ref_count:
                self._link(block, self._ends if block.digest is None else self._ends.prev)
                self.num_free += 1

    def publish(self, block: Block, digest: bytes) -> None:
        """Names the content of a held block. An equal block that has the name already keeps it."""
        if self.cached.setdefault(digest, block) is block:
            block.digest = digest

    def forget_all(self) -> int:
        """Takes the name from every block; gives how many had one."""
        num_cached = len(self.cached)
        for block in list(self.cached.values()):
            self._forget(block)
        return num_cached

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self.cached[block.digest]
            block.digest = None

    def _link(self, block: Block, before: Block) -> None:
        block.prev, block.next = before, before.next
        before.next.prev = before.next = block
