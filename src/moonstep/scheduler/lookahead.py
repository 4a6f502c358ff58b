"""Which of the engine's blocks are about to be overwritten.

The engine frees a block without forgetting it: the block keeps its name at the end of the free
queue and is overwritten when it has come to the front. Blocks near the front are captured in the
steps before, so that the host cache holds what the engine drops and little else.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from moonstep.engine import Block, BlockPool
from moonstep.scheduler.columns import BlockKey

_AHEAD_FACTOR = 2
_AHEAD_MIN_BLOCKS = 16
_PEAK_DECAY = 0.99


class LookAhead:
    """Walks the front of the free queue, as deep as a step may take.

    How deep is learnt: twice the most blocks a step has taken lately. A step that takes more costs
    what it took beyond that, once.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._peak_blocks = 0.0
        self._taken_blocks = 0
        self._looked_at: dict[int, BlockKey] = {}
        self._front: tuple[int, int] | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to walk."""
        self._pool = pool

    @property
    def ahead_blocks(self) -> int:
        """How many blocks from the front are looked at."""
        return max(_AHEAD_MIN_BLOCKS, int(_AHEAD_FACTOR * self._peak_blocks))

    def saw_taken(self, blocks: Sequence[int]) -> None:
        """The step that is being built took these blocks from the queue."""
        self._taken_blocks += len(blocks)
        looked_at = self._looked_at
        for block in blocks:
            looked_at.pop(block, None)

    @property
    def passed_on(self) -> Container[int]:
        """Blocks that were passed on and have not been taken since. A view: it follows."""
        return self._looked_at.keys()

    @property
    def has_news(self) -> bool:
        """Whether the front of the queue may have changed since it was last walked."""
        return self._front is None or self._front != self._front_now()

    def next_to_go(self) -> Iterator[tuple[int, BlockKey]]:
        """Named blocks near the front that were not looked at yet, the next to go first.

        Each is passed on once, until ``look_again``.
        """
        pool = self._pool
        if pool is None or not pool.enable_caching:
            return
        self._learn()
        queue = pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        self._front = self._front_now()
        looked_at = self._looked_at
        for _ in range(min(self.ahead_blocks, queue.num_free_blocks)):
            if block is None:
                return
            key = block.block_hash
            if key is not None and looked_at.get(block.block_id) != key:
                looked_at[block.block_id] = key
                yield block.block_id, key
            block = _next(block)

    def look_again(self, blocks: Sequence[int]) -> None:
        """What became of ``blocks`` last time no longer holds: pass them on once more."""
        if not blocks:
            return
        looked_at = self._looked_at
        for block in blocks:
            looked_at.pop(block, None)
        self._front = None

    def forget(self) -> None:
        """Everything is to be looked at anew."""
        self._looked_at.clear()
        self._front = None

    def _front_now(self) -> tuple[int, int] | None:
        """The block that goes next, and how many there are."""
        if self._pool is None:
            return None
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        return (block.block_id if block is not None else -1, queue.num_free_blocks)

    def _learn(self) -> None:
        if self._taken_blocks:
            self._peak_blocks = max(float(self._taken_blocks), self._peak_blocks * _PEAK_DECAY)
            self._taken_blocks = 0


def _next(block: Block) -> Block | None:
    return block.next_free_block
