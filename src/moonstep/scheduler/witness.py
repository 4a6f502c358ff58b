"""Who vouches for a block: the engine's pool says its name, and we saw a step compute it.

A block carries its hash from allocation on, before it is computed, and keeps it when it is freed:
a hash alone proves nothing. So two witnesses have to agree before a block is captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moonstep.engine import BlockHash, BlockPool
from moonstep.scheduler.policies import Place

BlockKey = bytes
"""Block hash and group index (4 bytes, big-endian) as one, as the engine's pool writes it."""

_GROUP_BYTES = 4


def block_key(name: BlockHash, group: int) -> BlockKey:
    """The pool's own form of a block's name (vLLM ``make_block_hash_with_group_id``)."""
    return name + group.to_bytes(_GROUP_BYTES, "big")


def split_key(key: BlockKey) -> tuple[BlockHash, int]:
    """Name and group of a key.

    >>> split_key(block_key(b"name", 3))
    (b'name', 3)
    """
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class Computed(NamedTuple):
    """What a step that we saw scheduled put into a block, and where that stands in a prefix."""

    key: BlockKey
    place: Place


class Witness:
    """Which name each of the engine's blocks was computed under, as far as we saw it scheduled."""

    def __init__(self) -> None:
        self._computed: dict[int, Computed] = {}
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the first witness."""
        self._pool = pool

    def saw_computed(self, block: int, key: BlockKey, place: Place) -> None:
        """A step that fills ``block`` with ``key`` is scheduled, by computing or by a restore."""
        self._computed[block] = Computed(key, place)

    def saw_allocated(self, blocks: Iterable[int]) -> None:
        """These blocks were handed out anew: what they held is about to be overwritten."""
        for block in blocks:
            self._computed.pop(block, None)

    def vouches(self, block: int, key: BlockKey) -> bool:
        """Whether ``block`` holds ``key``, in this step, by both witnesses.

        Without prefix caching the engine keeps no hash; then the request's table of this step,
        from which the caller has the block, is the first witness.
        """
        computed = self._computed.get(block)
        if computed is None or computed.key != key:
            return False
        pool = self._pool
        return pool is None or not pool.enable_caching or pool.blocks[block].block_hash == key

    def place_of(self, block: int, key: BlockKey) -> Place | None:
        """Where ``key`` stands, if a step that filled ``block`` with it was seen: else ``None``."""
        computed = self._computed.get(block)
        return computed.place if computed is not None and computed.key == key else None

    def forget(self) -> None:
        """Nothing computed so far counts any more: the caches were reset."""
        self._computed.clear()
