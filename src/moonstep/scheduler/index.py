"""The host-cache index: which block lives in which slot, and which slots may be promised.

The index alone decides; the workers obey. A slot goes free -> planned -> written -> free. It is
*planned* when a step's plan tells the workers to capture into it, and *written* once every rank has
reported that capture: only then is it found by a lookup. A *pinned* slot is promised to a load that
takes several steps and stays as it is until that load lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from moonstep.engine import BlockHash
from moonstep.scheduler.policies import EvictionPolicy, Place
from moonstep.scheduler.residency import Residency
from moonstep.scheduler.witness import BlockKey, block_key


class SlotState(IntEnum):
    """What may be done with a slot."""

    FREE = 0
    PLANNED = 1
    WRITTEN = 2
    DOOMED = 3
    """Written and promised before a reset: never found again, free when its last pin goes."""


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
    evicted_resident: int = 0
    """Of these, copies of what the engine still held."""
    refused: int = 0
    """Captures that found no slot to give them."""


class HostIndex:
    """Names of blocks to slots, for every group. Scheduler thread only; moves slots only in a step.

    It has no slots until ``resize`` was called, so nothing is planned or found before that.
    """

    def __init__(
        self, group_count: int, policy: EvictionPolicy, residency: Residency | None = None
    ) -> None:
        self.counts = IndexCounts()
        self.residency = residency or Residency()
        self._policy = policy
        self._written: list[dict[BlockHash, int]] = [{} for _ in range(group_count)]
        self._planned: list[dict[BlockHash, int]] = [{} for _ in range(group_count)]
        # By slot. Invariant: a slot that is not free has a name; a free one has none.
        self._state = bytearray()
        self._generation: list[int] = []
        self._name: list[BlockHash] = []
        self._group: list[int] = []
        self._free: list[int] = []
        self._pins: Counter[int] = Counter()

    @property
    def slot_count(self) -> int:
        return len(self._state)

    @property
    def written_count(self) -> int:
        return sum(len(names) for names in self._written)

    @property
    def planned_count(self) -> int:
        return self._state.count(SlotState.PLANNED)

    @property
    def pinned_count(self) -> int:
        return len(self._pins)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def resize(self, slot_count: int) -> None:
        """Give the index its slots. Once, when every rank has reported how many it has."""
        if self.slot_count:
            raise RuntimeError(f"the index has {self.slot_count} slots already")
        self._state = bytearray(slot_count)
        self._generation = [0] * slot_count
        self._name = [b""] * slot_count
        self._group = [0] * slot_count
        self._free = list(range(slot_count - 1, -1, -1))

    def written_run(self, group: int, names: Sequence[BlockHash], start: int, stop: int) -> int:
        """Length of the leading run of ``names[start:stop]`` that can be promised, in blocks."""
        written = self._written[group]
        for position in range(start, stop):
            if names[position] not in written:
                return position - start
        return stop - start

    def holds(self, group: int, name: BlockHash) -> bool:
        """Whether a slot has this block or is about to."""
        return name in self._written[group] or name in self._planned[group]

    def locate(self, group: int, name: BlockHash) -> Placement | None:
        """Where a written block lies."""
        slot = self._written[group].get(name)
        return None if slot is None else Placement(group, name, slot, self._generation[slot])

    def plan(self, place: Place, group: int, name: BlockHash) -> Placement | None:
        """Give the block at ``place`` a slot to be captured into.

        Takes a free slot, or evicts: first what the engine still holds, then what the policy says,
        and of the block's own chain only what is deeper: a deeper block is not worth a shallower
        one of the same prefix. ``None`` if there is no slot. The block must not be held already.
        """
        if self.holds(group, name):
            raise ValueError(f"block {name.hex()} of group {group} has a slot already")
        slot = self._take_slot(place)
        if slot is None:
            self.counts.refused += 1
            return None
        self._state[slot] = SlotState.PLANNED
        self._generation[slot] += 1
        self._name[slot] = name
        self._group[slot] = group
        self._planned[group][name] = slot
        self._policy.add(place, slot)
        return Placement(group, name, slot, self._generation[slot])

    def acknowledge(self, placement: Placement) -> bool:
        """Every rank has captured it: the slot may be promised. False if a reset came between."""
        return self._settle(placement, written=True)

    def abandon(self, placement: Placement) -> bool:
        """Some rank has not captured it: the slot is free again, and nothing was promised."""
        return self._settle(placement, written=False)

    def use(
        self, chain: int, group: int, names: Sequence[BlockHash], blocks: Sequence[int]
    ) -> None:
        """``chain`` begins with these blocks, head first, as far as they are written.

        ``blocks`` are those of the engine that hold the first of them already.
        """
        written = self._written[group]
        used = [(depth, written[name]) for depth, name in enumerate(names) if name in written]
        self._policy.use(chain, used)
        for depth, slot in used:
            if depth >= len(blocks):
                break
            self.residency.note(slot, blocks[depth])

    def pin(self, slots: Iterable[int]) -> None:
        """Keep these written slots as they are until ``unpin``; pins count."""
        self._pins.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        """Take back one ``pin`` of each of these slots."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] > 0:
                continue
            del self._pins[slot]
            if self._state[slot] == SlotState.DOOMED:
                self._release(slot)

    def reset(self) -> None:
        """Forget every block.

        A slot that a worker may still write, or that is pinned, is found no more and goes free when
        that has ended.
        """
        for names in self._planned:
            names.clear()
        for names in self._written:
            slots = list(names.values())
            names.clear()
            for slot in slots:
                self._state[slot] = SlotState.DOOMED
                if slot not in self._pins:
                    self._release(slot)

    def check(self) -> None:
        """Raise AssertionError unless states, names, pins and free slots add up."""
        states = list(self._state)
        assert sorted(self._free) == [s for s, st in enumerate(states) if st == SlotState.FREE]
        for tables, state in (
            (self._written, SlotState.WRITTEN),
            (self._planned, SlotState.PLANNED),
        ):
            for group, names in enumerate(tables):
                for name, slot in names.items():
                    assert states[slot] == state, (slot, states[slot], state)
                    assert (self._name[slot], self._group[slot]) == (name, group), slot
        assert self.written_count == states.count(SlotState.WRITTEN)
        for group, names in enumerate(self._planned):
            assert not names.keys() & self._written[group].keys(), "planned and written"
        for slot, pins in self._pins.items():
            assert pins > 0, slot
            assert states[slot] in (SlotState.WRITTEN, SlotState.DOOMED), slot
        assert states.count(SlotState.DOOMED) <= len(self._pins), "doomed without a pin"

    def _take_slot(self, place: Place) -> int | None:
        if self._free:
            return self._free.pop()
        victim = self.residency.choose(self._may_leave, self._key_of)
        if victim is not None:
            self.counts.evicted_resident += 1
        else:
            victim = self._policy.choose(
                lambda at, slot: (
                    (at.chain != place.chain or at.depth > place.depth) and self._may_leave(slot)
                )
            )
        if victim is None:
            return None
        self.counts.evicted += 1
        self._release(victim)
        return self._free.pop()

    def _may_leave(self, slot: int) -> bool:
        return self._state[slot] == SlotState.WRITTEN and slot not in self._pins

    def _key_of(self, slot: int) -> BlockKey:
        return block_key(self._name[slot], self._group[slot])

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
        if self._state[slot] == SlotState.WRITTEN:
            del self._written[self._group[slot]][self._name[slot]]
        self._state[slot] = SlotState.FREE
        self._name[slot] = b""
        self.residency.forget(slot)
        self._policy.remove(slot)
        self._free.append(slot)
