"""Which of the engine's blocks are about to be overwritten.

The engine frees a block without forgetting it: the block keeps its name at the end of the free
queue and is overwritten when it has come to the front. Blocks near the front are captured in the
steps before, so that the host cache holds what the engine drops and little else.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from moonstep.engine import Block, BlockPool
from moonstep.scheduler.columns import BlockKey

_MARGIN: Final = 1.25
_MIN_BLOCKS: Final = 16
_PEAK_DECAY: Final = 0.99
_WALKS_PER_RECOUNT: Final = 64


class Going(NamedTuple):
    """Blocks about to be overwritten, and the key each of them carries."""

    blocks: list[int]
    keys: list[BlockKey]


class LookAhead:
    """A window at the front of the free queue, as deep as a step may take.

    How deep is learnt: somewhat more than the most blocks a step has taken lately. A step that
    takes more loses what it took beyond that, once. The window is not walked anew in each step: as
    blocks leave it at the front, as many are looked at behind it.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._peak_blocks = 0.0
        self._taken_blocks = 0
        self._looked_at: dict[int, BlockKey] = {}
        self._front: tuple[int, int] | None = None
        self._last: Block | None = None  # the deepest block looked at
        self._depth = 0  # how many blocks the window has at least, up to and with _last
        self._walks = 0

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to walk."""
        self._pool = pool

    @property
    def window_blocks(self) -> int:
        """How many blocks from the front are looked at."""
        return max(_MIN_BLOCKS, int(_MARGIN * self._peak_blocks))

    @property
    def passed_on(self) -> Container[int]:
        """Blocks that were passed on and have not been taken since. A view: it follows."""
        return self._looked_at.keys()

    @property
    def has_news(self) -> bool:
        """Whether the front of the queue may have changed since it was last walked."""
        return self._front is None or self._front != self._front_now()

    def saw_taken(self, blocks: Sequence[int]) -> None:
        """The step that is being built took these blocks from the queue."""
        self._taken_blocks += len(blocks)
        self._depth -= len(blocks)
        self._forget_each(blocks)

    def saw_used_again(self, blocks: Sequence[int]) -> None:
        """These blocks are in use again with what they hold; they come back as new ones."""
        before = len(self._looked_at)
        self._forget_each(blocks)
        self._depth -= before - len(self._looked_at)

    def look_again(self, blocks: Sequence[int]) -> None:
        """What became of ``blocks`` last time no longer holds: pass them on once more."""
        if blocks:
            self._forget_each(blocks)
            self._recount()

    def next_to_go(self) -> Going:
        """Named blocks that came into the window, the next to go first. Each is passed on once."""
        going = Going([], [])
        pool = self._pool
        if pool is None or not pool.enable_caching:
            return going
        self._learn()
        self._front = self._front_now()
        block = self._resume(pool)
        stop = min(self.window_blocks, pool.free_block_queue.num_free_blocks)
        depth, last, looked_at = self._depth, self._last, self._looked_at
        while block is not None and depth < stop:
            depth += 1
            last = block
            key = block.block_hash
            if key is not None and looked_at.get(block.block_id) != key:
                looked_at[block.block_id] = key
                going.blocks.append(block.block_id)
                going.keys.append(key)
            block = block.next_free_block
        self._depth, self._last = depth, last
        return going

    def forget(self) -> None:
        """Everything is to be looked at anew."""
        self._looked_at.clear()
        self._recount()

    def _resume(self, pool: BlockPool) -> Block | None:
        """The block to go on with: behind the last one, or the first if that is not where it was.

        Blocks that come back in front of the window are not counted, so now and then it is counted
        from the front.
        """
        self._walks += 1
        last = self._last
        moved = last is None or last.block_id not in self._looked_at or last.ref_cnt > 0
        if moved or self._walks >= _WALKS_PER_RECOUNT:
            self._recount()
            self._front = self._front_now()
            return pool.free_block_queue.fake_free_list_head.next_free_block
        return last.next_free_block if last is not None else None

    def _recount(self) -> None:
        self._last, self._depth, self._walks = None, 0, 0
        self._front = None

    def _forget_each(self, blocks: Sequence[int]) -> None:
        looked_at = self._looked_at
        for block in blocks:
            looked_at.pop(block, None)

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
