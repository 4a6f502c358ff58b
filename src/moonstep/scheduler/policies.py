"""What leaves the host cache first.

Slots hang on *chains*: one for each life, in the order of the prefix. A slot belongs to the chain
that used it last. The chain that was unused longest gives first, and gives its tail before its
head: a prefix without its head is worth nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from moonstep.scheduler.columns import Numbers, numbers

ChainId = int


class Place(NamedTuple):
    """Where a block stands in a prefix: on which chain, and how many blocks lie before it."""

    chain: ChainId
    depth: int


class EvictionPolicy(Protocol):
    """Order among slots. It never owns a slot: the index tells it what comes, goes and is used."""

    def add(
        self, chains: Sequence[ChainId], depths: Sequence[int], slots: Sequence[int] | Numbers
    ) -> None:
        """``slots`` are new, each on its chain at its depth; the chains were used just now."""

    def use(self, chain: ChainId, depths: Sequence[int], slots: Sequence[int]) -> None:
        """``chain`` uses ``slots``, head first, each at its depth: they are its own now."""

    def remove(self, slots: Sequence[int] | Numbers) -> None:
        """``slots`` are free again."""

    def choose(self, may_leave: Callable[[Place, int], bool]) -> int | None:
        """The slot that should leave first among those that may, or ``None``.

        ``may_leave(place, slot)`` is asked for the deepest slot of each chain in turn; a chain
        whose deepest slot has to stay is passed over whole. Nothing is removed.
        """

    def choose_many(
        self,
        count: int,
        may_leave: Callable[[Sequence[int]], list[bool]],
        spared: Container[ChainId],
    ) -> list[int]:
        """Up to ``count`` slots that should leave first, none of them of a spared chain.

        As ``choose``, by the batch. Nothing is removed.
        """

    def behind(self, slot: int, count: int) -> Numbers:
        """Up to ``count`` slots of the slot's chain, from it on, the shallowest first.

        They may be fewer than the chain has: it is told where to look, not what is there.
        """


_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1
_NO_CHAIN: Final = -1
_FEW: Final = 24
"""Slots that are listed sooner one by one than it is found out what runs they are."""


@dataclass(slots=True)
class _Chain:
    # Depth and slot in one number each, ascending: numbers are cheaper than tuples to sort, and
    # in an array they need no objects, neither when they come by the run nor when they are read.
    items: array[int] = field(default_factory=lambda: array("q"))
    live: int = 0


class LruPolicy:
    """Least recently used chain first; within a chain the tail before the head.

    Adding and removing cost O(1) (a shallower slot is inserted in place), a use O(slots used). A
    slot that moved to another place, or was freed, stays listed at its old one until a walk from
    the tail comes by.
    """

    def __init__(self) -> None:
        self._chains: dict[ChainId, _Chain] = {}  # Invariant: oldest use first, none without a slot
        # By slot; an entry of a chain counts only if both still name it.
        self._chain_of: Numbers = np.full(0, _NO_CHAIN, dtype=np.int64)
        self._item_of: Numbers = np.zeros(0, dtype=np.int64)

    def add(
        self, chains: Sequence[ChainId], depths: Sequence[int], slots: Sequence[int] | Numbers
    ) -> None:
        if not len(slots):
            return
        at = numbers(slots)
        self._reserve(int(at.max()) + 1)
        items = numbers(depths) << _SLOT_BITS | at
        self._item_of[at] = items
        self._chain_of[at] = chains
        if len(items) > _FEW:
            runs = np.flatnonzero(np.diff(self._chain_of[at])) + 1
            if 4 * len(runs) < len(items):
                for run in np.split(items, runs):
                    self._list_run(int(self._chain_of[run[0] & _SLOT_MASK]), run)
                return
        pop, listed = self._chains.pop, self._chains
        for chain, item in zip(chains, items.tolist(), strict=True):
            listed[chain] = entry = pop(chain, None) or _Chain()
            known = entry.items
            if not known or known[-1] < item:
                known.append(item)
            else:
                insort(known, item)
            entry.live += 1

    def use(self, chain: ChainId, depths: Sequence[int], slots: Sequence[int]) -> None:
        at = numbers(slots)
        moved = self._chain_of[at] != chain
        self.remove(at[moved])
        at, items = at[moved], (numbers(depths) << _SLOT_BITS | at)[moved]
        self._item_of[at] = items
        self._chain_of[at] = chain
        self._list_run(chain, items)

    def remove(self, slots: Sequence[int] | Numbers) -> None:
        at = numbers(slots)
        at = at[at < len(self._chain_of)]
        left = Counter(self._chain_of[at].tolist())
        left.pop(_NO_CHAIN, None)
        self._chain_of[at] = _NO_CHAIN
        for chain, count in left.items():
            entry = self._chains[chain]
            entry.live -= count
            if not entry.live:
                del self._chains[chain]

    def choose(self, may_leave: Callable[[Place, int], bool]) -> int | None:
        for chain, entry in self._chains.items():
            self._trim(chain, entry)
            item = entry.items[-1]
            slot = item & _SLOT_MASK
            if may_leave(Place(chain, item >> _SLOT_BITS), slot):
                return slot
        return None

    def choose_many(
        self,
        count: int,
        may_leave: Callable[[Sequence[int]], list[bool]],
        spared: Container[ChainId],
    ) -> list[int]:
        chosen: list[int] = []
        for chain, entry in self._chains.items():
            if len(chosen) >= count:
                break
            if chain not in spared:
                self._trim(chain, entry)
                chosen += self._tail(chain, entry, count - len(chosen), may_leave)
        return chosen

    def _tail(
        self,
        chain: ChainId,
        entry: _Chain,
        count: int,
        may_leave: Callable[[Sequence[int]], list[bool]],
    ) -> list[int]:
        """Up to ``count`` of a chain's slots, deepest first, up to one that has to stay."""
        found: list[int] = []
        stop, previous = len(entry.items), -1
        while stop and len(found) < count:
            start = max(0, stop - (count - len(found)))
            items = _items(entry, start, stop)[::-1]
            at = items & _SLOT_MASK
            there = (self._chain_of[at] == chain) & (self._item_of[at] == items)
            # A slot that left and came back to its place is listed twice.
            there &= items != np.concatenate(([previous], items[:-1]))
            slots = at[there].tolist()
            leaves = may_leave(slots)
            if False in leaves:
                found += slots[: leaves.index(False)]
                break
            found += slots
            stop, previous = start, int(items[-1])
        return found

    def behind(self, slot: int, count: int) -> Numbers:
        chain, item = int(self._chain_of[slot]), int(self._item_of[slot])
        entry = self._chains[chain]
        start = bisect_left(entry.items, item)
        items = _items(entry, start, start + count)
        at = items & _SLOT_MASK
        there = (self._chain_of[at] == chain) & (self._item_of[at] == items)
        return at if there.all() else at[there]

    def __len__(self) -> int:
        return int(np.count_nonzero(self._chain_of != _NO_CHAIN))

    def check(self) -> None:
        """Raise AssertionError unless every chain counts exactly the slots that name it."""
        for chain, entry in self._chains.items():
            assert entry.items.tolist() == sorted(entry.items), chain
            listed = {item for item in entry.items if self._counts(chain, item)}
            assert len(listed) == entry.live > 0, f"chain {chain}: {len(listed)} != {entry.live}"
        assert sum(e.live for e in self._chains.values()) == len(self)

    def _counts(self, chain: ChainId, item: int) -> bool:
        """Whether a chain's entry is where its slot really stands."""
        slot = item & _SLOT_MASK
        return bool(self._chain_of[slot] == chain and self._item_of[slot] == item)

    def _trim(self, chain: ChainId, entry: _Chain) -> None:
        """Drop entries behind the deepest slot that is still there."""
        items = entry.items
        while not self._counts(chain, items[-1]):
            items.pop()

    def _reserve(self, slot_count: int) -> None:
        """Make room for what is known of so many slots."""
        missing = slot_count - len(self._chain_of)
        if missing > 0:
            room = max(missing, len(self._chain_of))
            self._chain_of = np.append(self._chain_of, np.full(room, _NO_CHAIN, dtype=np.int64))
            self._item_of = np.append(self._item_of, np.zeros(room, dtype=np.int64))

    def _refresh(self, chain: ChainId) -> _Chain:
        entry = self._chains.pop(chain, None) or _Chain()
        self._chains[chain] = entry
        return entry

    def _list_run(self, chain: ChainId, items: Numbers) -> None:
        """List entries of one chain in few passes: most runs go behind or before what is there."""
        if not len(items):
            if chain in self._chains:
                self._refresh(chain)
            return
        entry = self._refresh(chain)
        items = np.sort(items)
        known, new = entry.items, array("q", items.tobytes())
        if not known or known[-1] < new[0]:
            known.extend(new)
        elif new[-1] < known[0]:
            known[:0] = new
        else:
            items = np.sort(np.concatenate((_items(entry, 0, len(known)), items)))
            entry.items = array("q", items.tobytes())
        entry.live += len(new)


def _items(entry: _Chain, start: int, stop: int) -> Numbers:
    """A copy of a chain's entries ``[start, stop)``: no array may grow while another reads it."""
    return np.frombuffer(entry.items[start:stop], dtype=np.int64)
