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

import numpy as np
import numpy.typing as npt

from moonstep.engine import BlockHash
from moonstep.scheduler.columns import BlockKey, Columns, first_of_each, key_suffix
from moonstep.scheduler.policies import EvictionPolicy
from moonstep.scheduler.residency import Residency
from moonstep.wire import Rows, make_rows


class SlotState(IntEnum):
    """What may be done with a slot."""

    FREE = 0
    PLANNED = 1
    WRITTEN = 2
    DOOMED = 3
    """Written and promised before a reset: never found again, free when its last pin goes."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Blocks with the slots they are to be captured into.

    The generation tells this use of the slots from every other one.
    """

    columns: Columns
    slots: list[int]
    generation: int

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def rows(self) -> Rows:
        return make_rows(self.columns.group, self.columns.blocks, self.slots, self.generation)


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
        self._states: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)  # the same memory
        self._generation: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._group: npt.NDArray[np.int16] = np.zeros(0, dtype=np.int16)
        self._name: dict[int, BlockHash] = {}
        self._free: list[int] = []
        self._pins: Counter[int] = Counter()
        self._disowned: set[int] = set()  # planned, and found under no name
        self._generation_count = 0

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
        self._states = np.frombuffer(self._state, dtype=np.uint8)
        self._generation = np.zeros(slot_count, dtype=np.int32)
        self._group = np.zeros(slot_count, dtype=np.int16)
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

    def has_written(self, group: int, names: Iterable[BlockHash]) -> bool:
        """Whether all of these blocks can be promised."""
        return all(map(self._written[group].__contains__, names))

    def unheld(self, columns: Columns) -> Columns:
        """The rows whose block no slot has or is about to have, each name once."""
        written, planned = self._written[columns.group], self._planned[columns.group]
        names = columns.names
        if written.keys().isdisjoint(names) and planned.keys().isdisjoint(names):
            left = columns
        else:
            left = columns.only(name not in written and name not in planned for name in names)
        if len(set(left.names)) < len(left):
            return left.only(first_of_each(left.names))
        return left

    def locate(
        self, group: int, names: Sequence[BlockHash]
    ) -> tuple[list[int], npt.NDArray[np.int32]]:
        """Slots and generations of written blocks. KeyError for one that is not written."""
        written = self._written[group]
        slots = [written[name] for name in names]
        return slots, self._generation[slots]

    def plan(self, columns: Columns) -> Placed | None:
        """Give blocks slots to be captured into; ``None`` if there is none for any of them.

        Takes free slots, or evicts: first what the engine still holds, then what the policy says,
        and of a block's own chain only what is deeper: a deeper block is not worth a shallower one
        of the same prefix. Blocks without a slot are left out. None may be held already.
        """
        free, count = self._free, len(columns)
        if len(free) >= count:
            slots = free[-count:] if count else []
            del free[len(free) - count :]
            slots.reverse()
        else:
            columns, slots = self._make_room(columns)
        if not slots:
            return None
        group, names = columns.group, columns.names
        self._generation_count += 1
        self._states[slots] = SlotState.PLANNED
        self._generation[slots] = self._generation_count
        self._group[slots] = group
        self._name.update(zip(slots, names, strict=True))
        self._planned[group].update(zip(names, slots, strict=True))
        self._policy.add(columns.lives, columns.depths, slots)
        return Placed(columns, slots, self._generation_count)

    def acknowledge(self, placed: Placed) -> int:
        """Every rank has captured it: the slots may be promised.

        How many: fewer after a reset, or where the same block has another slot by now.
        """
        group, names, slots = placed.columns.group, placed.columns.names, placed.slots
        self._check_under_way(placed)
        planned, written = self._planned[group], self._written[group]
        if list(map(planned.get, names)) != slots:
            return sum(self._acknowledge_one(placed, at) for at in range(len(placed)))
        for name in names:
            del planned[name]
        written.update(zip(names, slots, strict=True))
        self._states[slots] = SlotState.WRITTEN
        return len(slots)

    def disown(self, placed: Placed) -> None:
        """It comes late, or never: the same blocks may be given other slots.

        The slots stay planned until ``acknowledge`` or ``abandon``. What is acknowledged then
        counts if its block has no other slot by that time.
        """
        planned = self._planned[placed.columns.group]
        for name, slot in zip(placed.columns.names, placed.slots, strict=True):
            if planned.get(name) == slot:
                del planned[name]
                self._disowned.add(slot)

    def abandon(self, placed: Placed) -> None:
        """Some rank has not captured it: the slots are free again, and nothing was promised."""
        self._check_under_way(placed)
        planned = self._planned[placed.columns.group]
        for name, slot in zip(placed.columns.names, placed.slots, strict=True):
            if planned.get(name) == slot:
                del planned[name]
            self._release(slot)

    def use(
        self, chain: int, group: int, names: Sequence[BlockHash], blocks: Sequence[int]
    ) -> None:
        """``chain`` begins with these blocks, head first, as far as they are written.

        ``blocks`` are those of the engine that hold the first of them already.
        """
        written = self._written[group]
        used = [(depth, written[name]) for depth, name in enumerate(names) if name in written]
        self._policy.use(chain, used)
        there = [(slot, blocks[depth]) for depth, slot in used if depth < len(blocks)]
        self.residency.note([slot for slot, _ in there], [block for _, block in there])

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
        self._disowned.clear()
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
        assert self._name.keys() == {s for s, st in enumerate(states) if st != SlotState.FREE}

    def _make_room(self, columns: Columns) -> tuple[Columns, list[int]]:
        """Slots for as many of the blocks as there is room for, in their order."""
        self._evict_many(len(columns) - len(self._free), set(columns.lives))
        slots: list[int] = []
        wanted: list[bool] = []
        for life, depth in zip(columns.lives, columns.depths, strict=True):
            slot = self._free.pop() if self._free else self._evict_own(life, depth)
            wanted.append(slot is not None)
            if slot is not None:
                slots.append(slot)
        if len(slots) == len(wanted):
            return columns, slots
        self.counts.refused += len(wanted) - len(slots)
        return columns.only(wanted), slots

    def _evict_many(self, count: int, spared: set[int]) -> None:
        """Free up to ``count`` slots, none on the chains of those who ask."""
        resident = self.residency.choose_many(count, self._may_leave, self._key_of)
        for slot in resident:
            self._release(slot)
        others = self._policy.choose_many(count - len(resident), self._may_leave, spared)
        for slot in others:
            self._release(slot)
        self.counts.evicted_resident += len(resident)
        self.counts.evicted += len(resident) + len(others)

    def _evict_own(self, life: int, depth: int) -> int | None:
        """A slot for a block at ``depth`` of ``life`` when all that is left is on such chains."""
        victim = self._policy.choose(
            lambda at, slot: (at.chain != life or at.depth > depth) and self._may_leave(slot)
        )
        if victim is None:
            return None
        self.counts.evicted += 1
        self._release(victim)
        return self._free.pop()

    def _may_leave(self, slot: int) -> bool:
        return self._state[slot] == SlotState.WRITTEN and slot not in self._pins

    def _key_of(self, slot: int) -> BlockKey:
        return self._name[slot] + key_suffix(int(self._group[slot]))

    def _check_under_way(self, placed: Placed) -> None:
        slots = placed.slots
        same = self._generation[slots] == placed.generation
        if not (same & (self._states[slots] == SlotState.PLANNED)).all():
            raise RuntimeError(f"slots {slots} are not on their way: settled twice or re-used")

    def _acknowledge_one(self, placed: Placed, at: int) -> bool:
        """``acknowledge`` of one block, when its name may have no slot or another one by now."""
        group, name, slot = placed.columns.group, placed.columns.names[at], placed.slots[at]
        is_free = slot in self._disowned and not self.holds(group, name)
        if self._planned[group].get(name) != slot and not is_free:
            self._release(slot)
            return False
        self._disowned.discard(slot)
        self._planned[group].pop(name, None)
        self._state[slot] = SlotState.WRITTEN
        self._written[group][name] = slot
        return True

    def _release(self, slot: int) -> None:
        if self._state[slot] == SlotState.WRITTEN:
            del self._written[int(self._group[slot])][self._name[slot]]
        self._state[slot] = SlotState.FREE
        self._disowned.discard(slot)
        del self._name[slot]
        self.residency.forget(slot)
        self._policy.remove(slot)
        self._free.append(slot)
