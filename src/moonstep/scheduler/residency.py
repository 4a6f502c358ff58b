"""What the engine's own cache still holds of what the host cache has.

A copy of what the engine still holds is worth nothing, so such slots leave first. The engine is
asked about each of them, never mirrored: the block that held the same content is either still
named so in its pool, or it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moonstep.engine import BlockPool
from moonstep.scheduler.columns import BlockKey


def _none(blocks: Sequence[int]) -> list[bool]:
    return [False] * len(blocks)


class Residency:
    """Slots whose content was last seen in a block of the engine, most recently seen last.

    ``about_to_go`` says which blocks the engine may overwrite next: a copy of what they hold is the
    opposite of worthless.
    """

    def __init__(self, about_to_go: Callable[[Sequence[int]], Sequence[bool]] = _none) -> None:
        self._pool: BlockPool | None = None
        self._about_to_go = about_to_go
        self._block_of: dict[int, int] = {}

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to ask."""
        self._pool = pool

    def note(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """``blocks`` of the engine have the content of ``slots`` from this step on."""
        block_of = self._block_of
        if not block_of.keys().isdisjoint(slots):
            self.forget(slots)
        block_of.update(zip(slots, blocks, strict=False))

    def forget(self, slots: Iterable[int]) -> None:
        """These slots hold something else now, or nothing."""
        block_of = self._block_of
        for slot in slots:
            block_of.pop(slot, None)

    def choose_many(
        self,
        count: int,
        may_leave: Callable[[Sequence[int]], Sequence[bool]],
        keys_of: Callable[[Sequence[int]], Sequence[BlockKey]],
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
        pool_blocks, about_to_go, block_of = pool.blocks, self._about_to_go, self._block_of
        kept: list[tuple[int, int]] = []
        while block_of and len(chosen) < count:
            last = [block_of.popitem() for _ in range(min(count - len(chosen), len(block_of)))]
            slots, blocks = [slot for slot, _ in last], [block for _, block in last]
            rows = zip(last, keys_of(slots), may_leave(slots), about_to_go(blocks), strict=True)
            for (slot, block), key, leaves, goes in rows:
                if goes or pool_blocks[block].block_hash != key:
                    continue
                if leaves:
                    chosen.append(slot)
                else:
                    kept.append((slot, block))
        block_of.update(reversed(kept))
        return chosen
