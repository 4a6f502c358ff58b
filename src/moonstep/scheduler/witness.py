"""Who vouches for a block: the engine's pool says its name, and we saw a step compute it.

A block carries its hash from allocation on, before it is computed, and keeps it when it is freed:
a hash alone proves nothing. So two witnesses have to agree before a block is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonstep.engine import BlockPool
from moonstep.scheduler.columns import BlockKey
from moonstep.scheduler.policies import Place


class Witness:
    """Which name each of the engine's blocks was computed under, as far as we saw it scheduled."""

    def __init__(self) -> None:
        # By block: its key, and the life and depth at which it was computed.
        self._computed: dict[int, tuple[BlockKey, int, int]] = {}
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the first witness."""
        self._pool = pool

    def saw_computed(
        self,
        blocks: Iterable[int],
        keys: Iterable[BlockKey],
        lives: Iterable[int],
        depths: Iterable[int],
    ) -> None:
        """A step that fills ``blocks`` with ``keys`` is scheduled, by computing or restoring."""
        self._computed.update(zip(blocks, zip(keys, lives, depths, strict=False), strict=False))

    def saw_allocated(self, blocks: Iterable[int]) -> None:
        """These blocks were handed out anew: what they held is about to be overwritten."""
        computed = self._computed
        for block in blocks:
            computed.pop(block, None)

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
        computed = self._computed.get(block)
        return computed is not None and computed[0] == key and self.pool_agrees((block,), [key])

    def place_of(self, block: int, key: BlockKey) -> Place | None:
        """Where ``key`` stands, if a step that filled ``block`` with it was seen: else ``None``."""
        computed = self._computed.get(block)
        return Place(*computed[1:]) if computed is not None and computed[0] == key else None

    def forget(self) -> None:
        """Nothing computed so far counts any more: the caches were reset."""
        self._computed.clear()
