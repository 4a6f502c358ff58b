"""What leaves the host cache first.

Slots hang on *chains*: one for each life, in the order of the prefix. A slot belongs to the chain
that used it last. The chain that was unused longest gives first, and gives its tail before its
head: a prefix without its head is worth nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, Protocol

ChainId = int


class Place(NamedTuple):
    """Where a block stands in a prefix: on which chain, and how many blocks lie before it."""

    chain: ChainId
    depth: int


class EvictionPolicy(Protocol):
    """Order among slots. It never owns a slot: the index tells it what comes, goes and is used."""

    def add(self, chains: Sequence[ChainId], depths: Sequence[int], slots: Sequence[int]) -> None:
        """``slots`` are new, each on its chain at its depth; the chains were used just now."""

    def use(self, chain: ChainId, slots: Iterable[tuple[int, int]]) -> None:
        """``chain`` uses these ``(depth, slot)``, head first: they are its own from here on."""

    def remove(self, slot: int) -> None:
        """``slot`` is free again."""

    def choose(self, may_leave: Callable[[Place, int], bool]) -> int | None:
        """The slot that should leave first among those that may, or ``None``.

        ``may_leave(place, slot)`` is asked for the deepest slot of each chain in turn; a chain
        whose deepest slot has to stay is passed over whole. Nothing is removed.
        """


@dataclass(slots=True)
class _Chain:
    slots: list[tuple[int, int]] = field(default_factory=list)
    live: int = 0


class LruPolicy:
    """Least recently used chain first; within a chain the tail before the head.

    Adding and removing cost O(1) (a shallower slot is inserted in place), a use O(slots used). A
    slot that moved to another place, or was freed, stays listed at its old one until the walk from
    the tail drops it (``_place_of`` tells).
    """

    def __init__(self) -> None:
        self._chains: dict[ChainId, _Chain] = {}  # Invariant: oldest use first, none without a slot
        self._place_of: dict[int, tuple[ChainId, int]] = {}

    def add(self, chains: Sequence[ChainId], depths: Sequence[int], slots: Sequence[int]) -> None:
        if len(set(chains)) == 1:
            self._add_run(chains[0], depths, slots)
            return
        for chain, depth, slot in zip(chains, depths, slots, strict=True):
            self._refresh(chain)
            self._attach(chain, depth, slot)

    def use(self, chain: ChainId, slots: Iterable[tuple[int, int]]) -> None:
        entry = self._refresh(chain)
        for depth, slot in slots:
            place = self._place_of.get(slot)
            if place is None or place[0] != chain:
                self.remove(slot)
                self._attach(chain, depth, slot)
        if not entry.live:
            del self._chains[chain]

    def remove(self, slot: int) -> None:
        place = self._place_of.pop(slot, None)
        if place is None:
            return
        entry = self._chains[place[0]]
        entry.live -= 1
        if not entry.live:
            del self._chains[place[0]]

    def choose(self, may_leave: Callable[[Place, int], bool]) -> int | None:
        for chain, entry in self._chains.items():
            slots = entry.slots
            while self._place_of.get(slots[-1][1]) != (chain, slots[-1][0]):
                slots.pop()
            depth, slot = slots[-1]
            if may_leave(Place(chain, depth), slot):
                return slot
        return None

    def __len__(self) -> int:
        return len(self._place_of)

    def check(self) -> None:
        """Raise AssertionError unless every chain counts exactly the slots that name it."""
        for chain, entry in self._chains.items():
            listed = {s for depth, s in entry.slots if self._place_of.get(s) == (chain, depth)}
            assert len(listed) == entry.live > 0, f"chain {chain}: {len(listed)} != {entry.live}"
        assert sum(e.live for e in self._chains.values()) == len(self._place_of)

    def _refresh(self, chain: ChainId) -> _Chain:
        entry = self._chains.pop(chain, None) or _Chain()
        self._chains[chain] = entry
        return entry

    def _add_run(self, chain: ChainId, depths: Sequence[int], slots: Sequence[int]) -> None:
        """``add`` for one chain, in few passes: most runs go behind or before what is there."""
        entry = self._refresh(chain)
        items = sorted(zip(depths, slots, strict=True))
        if not entry.slots or entry.slots[-1] < items[0]:
            entry.slots.extend(items)
        elif items[-1] < entry.slots[0]:
            entry.slots[:0] = items
        else:
            entry.slots.extend(items)
            entry.slots.sort()
        entry.live += len(items)
        self._place_of.update(zip(slots, zip(repeat(chain), depths, strict=False), strict=False))

    def _attach(self, chain: ChainId, depth: int, slot: int) -> None:
        entry = self._chains[chain]
        item = (depth, slot)
        if not entry.slots or entry.slots[-1] < item:
            entry.slots.append(item)
        else:
            insort(entry.slots, item)
        entry.live += 1
        self._place_of[slot] = (chain, depth)
