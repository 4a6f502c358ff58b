"""What the engine's own cache still holds of what the host cache has.

A copy of what the engine still holds is worth nothing, so such slots leave first. The engine is
asked about each of them, never mirrored: the block that held the same content is either still
named so in its pool, or it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from moonstep.engine import BlockPool
from moonstep.scheduler.columns import BlockKey


class Residency:
    """Slots whose content was last seen in a block of the engine, most recently seen last.

    ``about_to_go`` are the blocks the engine may overwrite next: a copy of what they hold is the
    opposite of worthless.
    """

    def __init__(self, about_to_go: Container[int] = ()) -> None:
        self._pool: BlockPool | None = None
        self._about_to_go = about_to_go
        self._block_of: dict[int, int] = {}

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to ask."""
        self._pool = pool

    def note(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """``blocks`` of the engine have the content of ``slots`` from this step on."""
        block_of = self._block_of
        for slot in slots:
            block_of.pop(slot, None)
        block_of.update(zip(slots, blocks, strict=False))

    def forget(self, slot: int) -> None:
        """``slot`` holds something else now, or nothing."""
        self._block_of.pop(slot, None)

    def choose_many(
        self, count: int, may_leave: Callable[[int], bool], key_of: Callable[[int], BlockKey]
    ) -> list[int]:
        """Up to ``count`` slots that may leave and whose content the engine still has.

        The last seen come first: what was seen last stays in the engine longest, and is captured
        again when it is about to go. Slots found to be resident no more, or about to be, are
        dropped from the notes, and so is what is chosen.
        """
        pool = self._pool
        chosen: list[int] = []
        if pool is None or not pool.enable_caching:
            return chosen
        kept: list[tuple[int, int]] = []
        while self._block_of and len(chosen) < count:
            slot, block = self._block_of.popitem()
            if block in self._about_to_go or pool.blocks[block].block_hash != key_of(slot):
                continue
            if may_leave(slot):
                chosen.append(slot)
            else:
                kept.append((slot, block))
        self._block_of.update(reversed(kept))
        return chosen
