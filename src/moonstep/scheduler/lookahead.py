"""Which of the engine's blocks are about to be overwritten.

The engine frees a block without forgetting it: the block keeps its name at the end of the free
queue and is overwritten when it has come to the front. Blocks near the front are captured in the
steps before, so that the host cache holds what the engine drops and little else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final, NamedTuple, cast

from moonstep.engine import Block, BlockPool
from moonstep.scheduler.byblock import ByBlock
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
        self._looked_at = ByBlock()  # the key under which each block was passed on
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

    def passed_on(self, blocks: Sequence[int]) -> list[bool]:
        """Which of ``blocks`` were passed on and have not been taken since."""
        return [key is not None for key in self._looked_at.get(blocks)]

    @property
    def has_news(self) -> bool:
        """Whether the front of the queue may have changed since it was last walked."""
        front, pool = self._front, self._pool
        if front is None or pool is None:
            return True
        queue = pool.free_block_queue
        first = queue.fake_free_list_head.next_free_block
        return front[1] != queue.num_free_blocks or first is None or front[0] != first.block_id

    def saw_taken(self, blocks: Sequence[int]) -> None:
        """The step that is being built took these blocks from the queue."""
        self._taken_blocks += len(blocks)
        self._depth -= len(blocks)
        self._looked_at.drop(blocks)

    def saw_used_again(self, blocks: Sequence[int]) -> None:
        """These blocks are in use again with what they hold; they come back as new ones."""
        self._depth -= sum(self.passed_on(blocks))
        self._looked_at.drop(blocks)

    def look_again(self, blocks: Sequence[int]) -> None:
        """What became of ``blocks`` last time no longer holds: pass them on once more."""
        if blocks:
            self._looked_at.drop(blocks)
            self._recount()

    def next_to_go(self) -> Going:
        """Named blocks that came into the window, the next to go first. Each is passed on once."""
        pool = self._pool
        if pool is None or not pool.enable_caching:
            return Going([], [])
        self._learn()
        self._front = self._front_now()
        block = self._resume(pool)
        stop = min(self.window_blocks, pool.free_block_queue.num_free_blocks)
        named: list[Block] = []
        depth, last = self._depth, self._last
        while block is not None and depth < stop:
            behind = block.next_free_block
            if behind is None:
                break  # the queue's end, which is no block
            depth += 1
            last = block
            if block.block_hash is not None:
                named.append(block)
            block = behind
        self._depth, self._last = depth, last
        return self._pass_on(named)

    def _pass_on(self, named: Sequence[Block]) -> Going:
        """Those of the blocks that were not passed on before under the name they have."""
        blocks = [block.block_id for block in named]
        keys = cast("list[BlockKey]", [block.block_hash for block in named])
        known = self._looked_at.get(blocks)
        if known.count(None) < len(known):
            news = [key != old for key, old in zip(keys, known, strict=True)]
            blocks, keys = list(compress(blocks, news)), list(compress(keys, news))
        self._looked_at.put(blocks, keys)
        return Going(blocks, keys)

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
        moved = last is None or last.ref_cnt > 0 or not self.passed_on([last.block_id])[0]
        if moved or self._walks >= _WALKS_PER_RECOUNT:
            self._recount()
            self._front = self._front_now()
            return pool.free_block_queue.fake_free_list_head.next_free_block
        return last.next_free_block if last is not None else None

    def _recount(self) -> None:
        self._last, self._depth, self._walks = None, 0, 0
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
