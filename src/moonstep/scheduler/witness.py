"""Who vouches for a block: the engine's pool says its name, and we saw a step compute it.

A block carries its hash from allocation on, before it is computed, and keeps it when it is freed:
a hash alone proves nothing. So two witnesses have to agree before a block is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonstep.engine import BlockPool
from moonstep.scheduler.columns import BlockKey, Columns


class Witness:
    """Which name each of the engine's blocks was computed under, as far as we saw it scheduled."""

    def __init__(self) -> None:
        # By block: its key, and the life and depth at which it was computed.
        self._key: dict[int, BlockKey] = {}
        self._life: dict[int, int] = {}
        self._depth: dict[int, int] = {}
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the first witness."""
        self._pool = pool

    def saw_computed(self, columns: Columns, keys: Sequence[BlockKey]) -> None:
        """A step that fills these blocks with ``keys`` is scheduled, by computing or restoring."""
        blocks = columns.blocks
        self._key.update(zip(blocks, keys, strict=True))
        self._life.update(zip(blocks, columns.lives, strict=True))
        self._depth.update(zip(blocks, columns.depths, strict=True))

    def saw_allocated(self, blocks: Iterable[int]) -> None:
        """These blocks were handed out anew: what they held is about to be overwritten."""
        key = self._key
        for block in blocks:
            key.pop(block, None)

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
        return self._key.get(block) == key and self.pool_agrees((block,), [key])

    def computed(self, group: int, blocks: Sequence[int], keys: Sequence[BlockKey]) -> Columns:
        """Those of ``blocks`` of ``group`` that were seen computed as the key beside them."""
        columns = Columns(group)
        key_of, suffix_bytes = self._key, len(columns.suffix)
        for block, key in zip(blocks, keys, strict=True):
            if key_of.get(block) == key:
                columns.add(self._life[block], self._depth[block], key[:-suffix_bytes], block)
        return columns

    def forget(self) -> None:
        """Nothing computed so far counts any more: the caches were reset."""
        self._key.clear()
