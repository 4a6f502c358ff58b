"""What leaves the host cache first.

Slots hang on *chains*: one for each life, in the order of the prefix. A slot belongs to the chain
that used it last. The chain that was unused longest gives first, and gives its tail before its
head: a prefix without its head is worth nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, NamedTuple, Protocol

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

    def choose_many(
        self, count: int, may_leave: Callable[[int], bool], spared: Container[ChainId]
    ) -> list[int]:
        """Up to ``count`` slots that should leave first, none of them of a spared chain.

        As ``choose``, by the batch. Nothing is removed.
        """


_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


@dataclass(slots=True)
class _Chain:
    # Depth and slot in one number each, ascending: numbers are cheaper than tuples to sort, and
    # the collector never looks at them.
    items: list[int] = field(default_factory=list)
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
        self._chain_of: dict[int, ChainId] = {}
        self._item_of: dict[int, int] = {}

    def add(self, chains: Sequence[ChainId], depths: Sequence[int], slots: Sequence[int]) -> None:
        items = [depth << _SLOT_BITS | slot for depth, slot in zip(depths, slots, strict=True)]
        self._item_of.update(zip(slots, items, strict=True))
        if len(set(chains)) == 1:
            self._chain_of.update(zip(slots, repeat(chains[0]), strict=False))
            self._list_run(chains[0], items)
            return
        self._chain_of.update(zip(slots, chains, strict=True))
        for chain, item in zip(chains, items, strict=True):
            self._list(self._refresh(chain), item)

    def use(self, chain: ChainId, slots: Iterable[tuple[int, int]]) -> None:
        entry = self._refresh(chain)
        chain_of = self._chain_of
        for depth, slot in slots:
            if chain_of.get(slot) != chain:
                self.remove(slot)
                chain_of[slot] = chain
                self._item_of[slot] = item = depth << _SLOT_BITS | slot
                self._list(entry, item)
        if not entry.live:
            del self._chains[chain]

    def remove(self, slot: int) -> None:
        chain = self._chain_of.pop(slot, None)
        if chain is None:
            return
        del self._item_of[slot]
        entry = self._chains[chain]
        entry.live -= 1
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
        self, count: int, may_leave: Callable[[int], bool], spared: Container[ChainId]
    ) -> list[int]:
        chosen: list[int] = []
        for chain, entry in self._chains.items():
            if len(chosen) >= count:
                break
            if chain in spared:
                continue
            self._trim(chain, entry)
            previous = None  # a slot that left and came back to its place is listed twice
            for item in reversed(entry.items):
                if item == previous or not self._counts(chain, item):
                    continue
                slot = item & _SLOT_MASK
                if len(chosen) >= count or not may_leave(slot):
                    break
                chosen.append(slot)
                previous = item
        return chosen

    def __len__(self) -> int:
        return len(self._chain_of)

    def check(self) -> None:
        """Raise AssertionError unless every chain counts exactly the slots that name it."""
        for chain, entry in self._chains.items():
            assert entry.items == sorted(entry.items), chain
            listed = {item for item in entry.items if self._counts(chain, item)}
            assert len(listed) == entry.live > 0, f"chain {chain}: {len(listed)} != {entry.live}"
        assert sum(e.live for e in self._chains.values()) == len(self._chain_of)
        assert self._chain_of.keys() == self._item_of.keys()

    def _counts(self, chain: ChainId, item: int) -> bool:
        """Whether a chain's entry is where its slot really stands."""
        slot = item & _SLOT_MASK
        return self._chain_of.get(slot) == chain and self._item_of[slot] == item

    def _trim(self, chain: ChainId, entry: _Chain) -> None:
        """Drop entries behind the deepest slot that is still there."""
        items = entry.items
        while not self._counts(chain, items[-1]):
            items.pop()

    def _refresh(self, chain: ChainId) -> _Chain:
        entry = self._chains.pop(chain, None) or _Chain()
        self._chains[chain] = entry
        return entry

    def _list(self, entry: _Chain, item: int) -> None:
        items = entry.items
        if not items or items[-1] < item:
            items.append(item)
        else:
            insort(items, item)
        entry.live += 1

    def _list_run(self, chain: ChainId, items: list[int]) -> None:
        """List entries of one chain in few passes: most runs go behind or before what is there."""
        entry = self._refresh(chain)
        items.sort()
        if not entry.items or entry.items[-1] < items[0]:
            entry.items.extend(items)
        elif items[-1] < entry.items[0]:
            entry.items[:0] = items
        else:
            entry.items.extend(items)
            entry.items.sort()
        entry.live += len(items)
