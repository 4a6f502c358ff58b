"""The host-cache index: which block lives in which slot, and which slots may be promised.

The index alone decides; the workers obey. A slot goes free -> planned -> written -> free. It is
*planned* when a step's plan tells the workers to capture into it, and *written* once every rank has
reported that capture: only then is it found by a lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from moonstep.engine import BlockHash
from moonstep.scheduler.policies import ChainId, EvictionPolicy


class SlotState(IntEnum):
    """What may be done with a slot."""

    FREE = 0
    PLANNED = 1
    WRITTEN = 2


class Placement(NamedTuple):
    """A block in a slot. The generation tells this use of the slot from every other one."""

    group: int
    name: BlockHash
    slot: int
    generation: int


@dataclass(slots=True)
class IndexCounts:
    """What the index has done since the start."""

    evicted: int = 0
    refused: int = 0
    """Captures that found no slot to give them."""


class HostIndex:
    """Names of blocks to slots, for every group. Scheduler thread only; moves slots only in a step.

    It has no slots until ``resize`` was called, so nothing is planned or found before that.
    """

    def __init__(self, group_count: int, policy: EvictionPolicy) -> None:
        self.counts = IndexCounts()
        self._policy = policy
        self._written: list[dict[BlockHash, int]] = [{} for _ in range(group_count)]
        self._planned: list[dict[BlockHash, int]] = [{} for _ in range(group_count)]
        # By slot. Invariant: a slot that is not free has a name; a free one has none.
        self._state = bytearray()
        self._generation: list[int] = []
        self._name: list[BlockHash | None] = []
        self._group: list[int] = []
        self._free: list[int] = []

    @property
    def slot_count(self) -> int:
        return len(self._state)

    @property
    def written_count(self) -> int:
        return sum(len(names) for names in self._written)

    @property
    def planned_count(self) -> int:
        return sum(self._state[slot] == SlotState.PLANNED for slot in range(self.slot_count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def resize(self, slot_count: int) -> None:
        """Give the index its slots. Once, when every rank has reported how many it has."""
        if self.slot_count:
            raise RuntimeError(f"the index has {self.slot_count} slots already")
        self._state = bytearray(slot_count)
        self._generation = [0] * slot_count
        self._name = [None] * slot_count
        self._group = [0] * slot_count
        self._free = list(range(slot_count - 1, -1, -1))

    def written_run(self, group: int, names: Sequence[BlockHash], start: int, stop: int) -> int:
        """Length of the leading run of ``names[start:stop]`` that can be promised, in blocks."""
        written = self._written[group]
        for position in range(start, stop):
            if names[position] not in written:
                return position - start
        return stop - start

    def is_written(self, group: int, name: BlockHash) -> bool:
        return name in self._written[group]

    def holds(self, group: int, name: BlockHash) -> bool:
        """Whether a slot has this block or is about to."""
        return name in self._written[group] or name in self._planned[group]

    def locate(self, group: int, name: BlockHash) -> Placement | None:
        """Where a written block lies."""
        slot = self._written[group].get(name)
        return None if slot is None else Placement(group, name, slot, self._generation[slot])

    def plan(self, chain: ChainId, group: int, name: BlockHash) -> Placement | None:
        """Give the block a slot to be captured into, as the deepest of ``chain``.

        Takes a free slot, or evicts what the policy says, but never from ``chain`` itself: a
        deeper block is not worth a shallower one of the same prefix. ``None`` if there is no slot.
        The block must not be held already.
        """
        if self.holds(group, name):
            raise ValueError(f"block {name.hex()} of group {group} has a slot already")
        slot = self._take_slot(chain)
        if slot is None:
            self.counts.refused += 1
            return None
        self._state[slot] = SlotState.PLANNED
        self._generation[slot] += 1
        self._name[slot] = name
        self._group[slot] = group
        self._planned[group][name] = slot
        self._policy.add(chain, slot)
        return Placement(group, name, slot, self._generation[slot])

    def acknowledge(self, placement: Placement) -> bool:
        """Every rank has captured it: the slot may be promised. False if a reset came between."""
        return self._settle(placement, written=True)

    def abandon(self, placement: Placement) -> bool:
        """Some rank has not captured it: the slot is free again, and nothing was promised."""
        return self._settle(placement, written=False)

    def use(self, chain: ChainId, group: int, names: Sequence[BlockHash]) -> None:
        """``chain`` uses these written blocks, head first."""
        written = self._written[group]
        self._policy.use(chain, [written[name] for name in names if name in written])

    def reset(self) -> None:
        """Forget every block. Slots a worker may still write stay planned until that has ended."""
        for slot, state in enumerate(self._state):
            if state == SlotState.WRITTEN:
                self._release(slot)
        for names in self._planned:
            names.clear()

    def check(self) -> None:
        """Raise AssertionError unless states, names, chains and free slots add up."""
        states = list(self._state)
        assert sorted(self._free) == [s for s, st in enumerate(states) if st == SlotState.FREE]
        for group, names in enumerate(self._written):
            for name, slot in names.items():
                assert states[slot] == SlotState.WRITTEN, (slot, states[slot])
                assert (self._name[slot], self._group[slot]) == (name, group), slot
        assert self.written_count == states.count(SlotState.WRITTEN)
        for group, names in enumerate(self._planned):
            for name, slot in names.items():
                assert states[slot] == SlotState.PLANNED, (slot, states[slot])
                assert (self._name[slot], self._group[slot]) == (name, group), slot
                assert name not in self._written[group], name.hex()

    def _take_slot(self, chain: ChainId) -> int | None:
        if not self._free:
            victim = self._policy.choose(
                lambda owner, slot: owner != chain and self._state[slot] == SlotState.WRITTEN
            )
            if victim is None:
                return None
            self._release(victim)
            self.counts.evicted += 1
        return self._free.pop()

    def _settle(self, placement: Placement, *, written: bool) -> bool:
        group, name, slot, generation = placement
        if self._generation[slot] != generation or self._state[slot] != SlotState.PLANNED:
            raise RuntimeError(f"{placement} is not on its way: slot settled twice or re-used")
        wanted = self._planned[group].get(name) == slot
        if wanted:
            del self._planned[group][name]
        if wanted and written:
            self._state[slot] = SlotState.WRITTEN
            self._written[group][name] = slot
            return True
        self._release(slot)
        return False

    def _release(self, slot: int) -> None:
        name = self._name[slot]
        if self._state[slot] == SlotState.WRITTEN and name is not None:
            del self._written[self._group[slot]][name]
        self._state[slot] = SlotState.FREE
        self._name[slot] = None
        self._policy.remove(slot)
        self._free.append(slot)
