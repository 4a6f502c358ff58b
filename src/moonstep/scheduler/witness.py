"""Who vouches for a block: the engine's pool says its name, and we saw a step compute it.

A block carries its hash from allocation on, before it is computed, and keeps it when it is freed:
a hash alone proves nothing. So two witnesses have to agree before a block is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import eq

import numpy as np

from moonstep.engine import BlockPool
from moonstep.scheduler.byblock import ByBlock
from moonstep.scheduler.columns import BlockKey, Columns, Numbers, numbers


class Witness:
    """Which name each of the engine's blocks was computed under, as far as we saw it scheduled.

    What is known of a block stands in arrays, by the block's number: they cost one touch of memory
    a block, and a step notes all its blocks at once.
    """

    def __init__(self) -> None:
        # By block: its key, and the life and depth at which it was computed.
        self._key = ByBlock()
        self._life: Numbers = np.zeros(0, dtype=np.int64)
        self._depth: Numbers = np.zeros(0, dtype=np.int64)
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the first witness."""
        self._pool = pool
        self._reserve(len(pool.blocks))
        self._key.reserve(len(pool.blocks))

    def saw_computed(self, columns: Columns, keys: Sequence[BlockKey]) -> None:
        """A step that fills these blocks with ``keys`` is scheduled, by computing or restoring."""
        if not columns:
            return
        self._reserve(max(columns.blocks) + 1)
        self._key.put(columns.blocks, keys)
        blocks = numbers(columns.blocks)
        self._life[blocks] = numbers(columns.lives)
        self._depth[blocks] = numbers(columns.depths)

    def saw_allocated(self, blocks: Sequence[int]) -> None:
        """These blocks were handed out anew: what they held is about to be overwritten."""
        self._key.drop(blocks)

    def pool_agrees(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> bool:
        """Whether the engine's pool knows each of ``blocks`` by the key beside it.

        Without prefix caching the engine keeps no hash; then the request's table of this step,
        from which the caller has the blocks, is the first witness.
        """
        pool = self._pool
        if pool is None or not pool.enable_caching:
            return True
        pool_blocks = pool.blocks
        return [pool_blocks[block].block_hash for block in blocks] == keys

    def vouches(self, block: int, key: BlockKey) -> bool:
        """Whether ``block`` holds ``key``, in this step, by both witnesses."""
        return self._key.get([block]) == [key] and self.pool_agrees((block,), [key])

    def computed(self, group: int, blocks: Sequence[int], keys: Sequence[BlockKey]) -> Columns:
        """Those of ``blocks`` of ``group`` that were seen computed as the key beside them."""
        columns = Columns(group)
        agreed = list(map(eq, self._key.get(blocks), keys))
        if not all(agreed):
            blocks, keys = list(compress(blocks, agreed)), list(compress(keys, agreed))
        at = numbers(blocks)
        name_bytes = -len(columns.suffix)
        columns.lives = self._life[at].tolist()
        columns.depths = self._depth[at].tolist()
        columns.names = [key[:name_bytes] for key in keys]
        columns.blocks = list(blocks)
        return columns

    def forget(self) -> None:
        """Nothing computed so far counts any more: the caches were reset."""
        self._key.clear()

    def _reserve(self, block_count: int) -> None:
        """Make room for what is known of so many blocks."""
        missing = block_count - len(self._life)
        if missing > 0:
            room = np.zeros(max(missing, len(self._life)), dtype=np.int64)
            self._life = np.append(self._life, room)
            self._depth = np.append(self._depth, room)
