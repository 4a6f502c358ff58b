"""Which of the engine's blocks are about to be overwritten.

The engine frees a block without forgetting it: the block keeps its name at the end of the free
queue and is overwritten when it has come to the front. Blocks near the front are captured in the
steps before, so that the host cache holds what the engine drops and little else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final, NamedTuple

import numpy as np

from moonstep.engine import Block, BlockPool, FreeBlockQueue
from moonstep.scheduler.columns import BlockKey, Numbers, numbers

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
        # By block: the key's hash under which it was passed on, or 0. Of two keys with one hash the
        # second would not be captured before it goes: of 2**63 there is no need to keep the keys.
        self._looked_at: Numbers = np.zeros(0, dtype=np.int64)
        self._queue: FreeBlockQueue | None = None
        self._front: Block | None = None  # what goes next, when the queue was last walked
        self._free_count = -1  # how many there were; none while it has to be walked
        self._last: Block | None = None  # the deepest block looked at
        self._depth = 0  # how many blocks the window has at least, up to and with _last
        self._walks = 0

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to walk."""
        self._pool, self._queue = pool, pool.free_block_queue
        self._looked_at = np.zeros(len(pool.blocks), dtype=np.int64)

    @property
    def window_blocks(self) -> int:
        """How many blocks from the front are looked at."""
        return max(_MIN_BLOCKS, int(_MARGIN * self._peak_blocks))

    def passed_on(self, blocks: Sequence[int]) -> list[bool]:
        """Which of ``blocks`` were passed on and have not been taken since."""
        if self._pool is None or not len(blocks):
            return [False] * len(blocks)
        passed_on: list[bool] = (self._looked_at[numbers(blocks)] != 0).tolist()
        return passed_on

    @property
    def has_news(self) -> bool:
        """Whether the front of the queue may have changed since it was last walked."""
        queue = self._queue  # asked in every step
        return (
            queue is None
            or queue.num_free_blocks != self._free_count
            or queue.fake_free_list_head.next_free_block is not self._front
        )

    def saw_taken(self, blocks: Sequence[int] | Numbers) -> None:
        """The step that is being built took these blocks from the queue."""
        self._taken_blocks += len(blocks)
        self._depth -= len(blocks)
        self._drop(blocks)

    def saw_used_again(self, blocks: Sequence[int]) -> None:
        """These blocks are in use again with what they hold; they come back as new ones."""
        if blocks:
            self._depth -= sum(self.passed_on(blocks))
            self._drop(blocks)

    def look_again(self, blocks: Sequence[int]) -> None:
        """What became of ``blocks`` last time no longer holds: pass them on once more."""
        if blocks:
            self._drop(blocks)
            self._recount()

    def next_to_go(self) -> Going:
        """Named blocks that came into the window, the next to go first. Each is passed on once."""
        pool = self._pool
        if pool is None or not pool.enable_caching:
            return Going([], [])
        self._learn()
        self._note_front()
        block = self._resume(pool)
        stop = min(self.window_blocks, pool.free_block_queue.num_free_blocks)
        blocks: list[int] = []
        keys: list[BlockKey] = []
        depth, last = self._depth, self._last
        while block is not None and depth < stop:
            behind = block.next_free_block
            if behind is None:
                break  # the queue's end, which is no block
            depth += 1
            last = block
            key = block.block_hash
            if key is not None:
                blocks.append(block.block_id)
                keys.append(key)
            block = behind
        self._depth, self._last = depth, last
        return self._pass_on(blocks, keys) if blocks else Going([], [])

    def _pass_on(self, blocks: list[int], keys: list[BlockKey]) -> Going:
        """Those of the blocks that were not passed on before under the name they have."""
        at = numbers(blocks)
        marks = np.fromiter(map(hash, keys), np.int64, len(keys)) | 1
        known = self._looked_at[at]
        self._looked_at[at] = marks
        if known.any():
            news = (known != marks).tolist()
            blocks, keys = list(compress(blocks, news)), list(compress(keys, news))
        return Going(blocks, keys)

    def _drop(self, blocks: Sequence[int] | Numbers) -> None:
        if self._pool is not None and len(blocks):
            self._looked_at[numbers(blocks)] = 0

    def forget(self) -> None:
        """Everything is to be looked at anew."""
        self._looked_at.fill(0)
        self._recount()

    def _resume(self, pool: BlockPool) -> Block | None:
        """The block to go on with: behind the last one, or the first if that is not where it was.

        Blocks that come back in front of the window are not counted, so now and then it is counted
        from the front.
        """
        self._walks += 1
        last = self._last
        moved = last is None or last.ref_cnt > 0 or not self._looked_at[last.block_id]
        if moved or self._walks >= _WALKS_PER_RECOUNT:
            self._recount()
            self._note_front()
            return pool.free_block_queue.fake_free_list_head.next_free_block
        return last.next_free_block if last is not None else None

    def _recount(self) -> None:
        self._last, self._depth, self._walks = None, 0, 0
        self._free_count = -1

    def _note_front(self) -> None:
        if self._queue is not None:
            self._front = self._queue.fake_free_list_head.next_free_block
            self._free_count = self._queue.num_free_blocks

    def _learn(self) -> None:
        if self._taken_blocks:
            self._peak_blocks = max(float(self._taken_blocks), self._peak_blocks * _PEAK_DECAY)
            self._taken_blocks = 0
