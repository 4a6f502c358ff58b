"""The engine tier: what vLLM's block pool does with blocks, and nothing else.

Field names are vLLM's own (``vllm.v1.core.block_pool.BlockPool``), so Moonstep's scheduler half
asks this pool as it asks the engine's. A test runs both through the same histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

BlockKey = bytes

GROUP: Final = 0
"""A replay knows one KV-cache group."""


def pool_key(name: bytes) -> BlockKey:
    """The pool's own form of a block's name (vLLM ``make_block_hash_with_group_id``)."""
    return name + GROUP.to_bytes(4, "big")


class PoolBlock:
    """A block, and its place in the free queue when nobody uses it (vLLM ``KVCacheBlock``)."""

    __slots__ = ("block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockKey | None = None
        self.prev_free_block: PoolBlock | None = None
        self.next_free_block: PoolBlock | None = None


class FreeQueue:
    """Free blocks, the next to be handed out first (vLLM ``FreeKVCacheBlockQueue``)."""

    def __init__(self, blocks: Iterable[PoolBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = PoolBlock(-1)
        self._tail = PoolBlock(-1)
        _link(self.fake_free_list_head, self._tail)
        for block in blocks:
            self.append(block)

    def append(self, block: PoolBlock) -> None:
        """``block`` is free, and is handed out last."""
        last = self._tail.prev_free_block
        assert last is not None
        _link(last, block)
        _link(block, self._tail)
        self.num_free_blocks += 1

    def prepend(self, block: PoolBlock) -> None:
        """``block`` is free, and is handed out next."""
        first = self.fake_free_list_head.next_free_block
        assert first is not None
        _link(self.fake_free_list_head, block)
        _link(block, first)
        self.num_free_blocks += 1

    def remove(self, block: PoolBlock) -> None:
        """``block`` is in use."""
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None
        assert after is not None
        _link(before, after)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def pop(self) -> PoolBlock:
        """Take the next block.

        Raises:
            IndexError: there is none.
        """
        block = self.fake_free_list_head.next_free_block
        if block is None or block is self._tail:
            raise IndexError("no free block is left")
        self.remove(block)
        return block


class EnginePool:
    """Blocks with names, users and a free queue: the engine's prefix cache."""

    def __init__(self, block_count: int) -> None:
        self.enable_caching = True
        self.blocks: Sequence[PoolBlock] = [PoolBlock(number) for number in range(block_count)]
        self.free_block_queue = FreeQueue(self.blocks)
        self._named: dict[BlockKey, list[PoolBlock]] = {}

    def cached(self, key: BlockKey) -> PoolBlock | None:
        """The oldest block that carries ``key``, if any does."""
        blocks = self._named.get(key)
        return blocks[0] if blocks else None

    def touch(self, blocks: Iterable[PoolBlock]) -> None:
        """One more user for each of these blocks."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def take(self, count: int) -> list[PoolBlock]:
        """Blocks from the front of the free queue; what they held is forgotten.

        Raises:
            IndexError: there are not so many.
        """
        taken = []
        for _ in range(count):
            block = self.free_block_queue.pop()
            self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def name(self, block: PoolBlock, key: BlockKey) -> None:
        """``block`` is full and can be found as ``key`` from here on."""
        block.block_hash = key
        self._named.setdefault(key, []).append(block)

    def free(self, blocks: Iterable[PoolBlock]) -> None:
        """One user fewer for each block; unused ones leave in this order, nameless ones first."""
        nameless: list[PoolBlock] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt:
                continue
            if block.block_hash is None:
                nameless.append(block)
            else:
                self.free_block_queue.append(block)
        for block in reversed(nameless):
            self.free_block_queue.prepend(block)

    def _forget(self, block: PoolBlock) -> None:
        key = block.block_hash
        if key is None:
            return
        block.block_hash = None
        others = self._named[key]
        others.remove(block)
        if not others:
            del self._named[key]


def _link(before: PoolBlock, after: PoolBlock) -> None:
    before.next_free_block = after
    after.prev_free_block = before
