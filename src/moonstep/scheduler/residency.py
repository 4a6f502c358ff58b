"""What the engine's own cache still holds of what the host cache has.

A copy of what the engine still holds is worth nothing, so such slots leave first. The engine is
asked about each of them, never mirrored: the block that held the same content is either still
named so in its pool, or it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq
from typing import Final

import numpy as np

from moonstep.engine import BlockPool
from moonstep.scheduler.columns import BlockKey, Flags, Numbers, numbers

_NOWHERE: Final = -1


def _none(blocks: Sequence[int] | Numbers) -> Flags:
    return np.zeros(len(blocks), dtype=np.bool_)


class Residency:
    """Slots whose content was last seen in a block of the engine, most recently seen last.

    ``about_to_go`` says which blocks the engine may overwrite next: a copy of what they hold is the
    opposite of worthless.
    """

    def __init__(self, about_to_go: Callable[[Numbers], Flags] = _none) -> None:
        self._pool: BlockPool | None = None
        self._about_to_go = about_to_go
        # Slots in the order in which they were seen, up to _top. One that was seen again, or
        # forgotten, stays where it was: an entry counts only if the slot still names its place.
        self._seen: Numbers = np.zeros(0, dtype=np.int64)
        self._top = 0
        self._place_of: Numbers = np.zeros(0, dtype=np.int64)  # by slot
        self._block_of: Numbers = np.zeros(0, dtype=np.int64)

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to ask."""
        self._pool = pool

    def resize(self, slot_count: int) -> None:
        """Make room for so many slots; of none of them anything is known."""
        self._seen, self._top = np.zeros(2 * slot_count, dtype=np.int64), 0
        self._place_of = np.full(slot_count, _NOWHERE, dtype=np.int64)
        self._block_of = np.zeros(slot_count, dtype=np.int64)

    def note(self, slots: Sequence[int] | Numbers, blocks: Sequence[int] | Numbers) -> None:
        """``blocks`` of the engine have the content of ``slots`` from this step on."""
        if len(slots):
            at = numbers(slots)
            self._block_of[at] = blocks
            self._see(at)

    def forget(self, slots: Sequence[int] | Numbers) -> None:
        """These slots hold something else now, or nothing."""
        self._place_of[numbers(slots)] = _NOWHERE

    def choose_many(
        self,
        count: int,
        may_leave: Callable[[Numbers], Flags],
        keys_of: Callable[[Numbers], list[BlockKey]],
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
        pool_blocks = pool.blocks
        kept: list[Numbers] = []
        while self._top and len(chosen) < count:
            slots = self._take_last(count - len(chosen))
            if not len(slots):
                continue
            blocks, keys = self._block_of[slots], keys_of(slots)
            hashes = [pool_blocks[block].block_hash for block in blocks.tolist()]
            goes, leaves = self._about_to_go(blocks), may_leave(slots)
            if hashes == keys and leaves.all() and not goes.any():  # as in most steps
                chosen += slots.tolist()
                continue
            resident = np.array(list(map(eq, hashes, keys))) & ~goes
            chosen += slots[resident & leaves].tolist()
            kept.append(slots[resident & ~leaves])
        if kept:
            self._see(np.concatenate(kept)[::-1])
        return chosen

    def _take_last(self, count: int) -> Numbers:
        """Take out what was seen last, the last one first; some of ``count`` may not count."""
        start = max(0, self._top - count)
        places = np.arange(start, self._top)[::-1]
        slots: Numbers = self._seen[places]
        counts = self._place_of[slots] == places
        if not counts.all():
            slots = slots[counts]
        self._place_of[slots] = _NOWHERE
        self._top = start
        return slots

    def _see(self, slots: Numbers) -> None:
        """Put slots at the end of those that were seen."""
        stop = self._top + len(slots)
        if stop > len(self._seen):
            self._tidy()
            stop = self._top + len(slots)
        self._seen[self._top : stop] = slots
        self._place_of[slots] = np.arange(self._top, stop)
        self._top = stop

    def _tidy(self) -> None:
        """Drop the entries that do not count; one counts for each slot, so half is free then."""
        seen = self._seen[: self._top]
        seen = seen[self._place_of[seen] == np.arange(self._top)]
        self._top = len(seen)
        self._seen[: self._top] = seen
        self._place_of[seen] = np.arange(self._top)
