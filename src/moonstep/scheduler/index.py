"""The host-cache index: which block lives in which slot, and which slots may be promised.

The index alone decides; the workers obey. A slot goes free -> planned -> written -> free. It is
*planned* when a step's plan tells the workers to capture into it, and *written* once every rank has
reported that capture: only then is it found by a lookup. A *pinned* slot is promised to a load that
takes several steps and stays as it is until that load lets go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from moonstep.engine import BlockHash
from moonstep.scheduler.columns import (
    BlockKey,
    Columns,
    Numbers,
    first_of_each,
    key_suffix,
    numbers,
)
from moonstep.scheduler.policies import EvictionPolicy
from moonstep.scheduler.residency import Residency
from moonstep.scheduler.slots import IndexCounts, Placed, SlotState


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
        # Every written slot stands here under its name, and every planned one but the nameless.
        self._slot_of: list[dict[BlockHash, int]] = [{} for _ in range(group_count)]
        # By slot. Invariant: a slot that is not free has a name; a free one has none.
        self._state = bytearray()
        self._states: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)  # the same memory
        self._generation: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._group: npt.NDArray[np.int16] = np.zeros(0, dtype=np.int16)
        self._name: npt.NDArray[np.object_] = np.full(0, None, dtype=object)
        self._free: list[int] = []
        self._pins: Counter[int] = Counter()
        # Planned, and found under no name: whether the slot may have its name again.
        self._nameless: dict[int, bool] = {}
        self._planned_count = 0
        self._generation_count = 0

    @property
    def slot_count(self) -> int:
        return len(self._state)

    @property
    def group_count(self) -> int:
        return len(self._slot_of)

    @property
    def written_count(self) -> int:
        return self._state.count(SlotState.WRITTEN)

    @property
    def planned_count(self) -> int:
        return self._planned_count

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
        self._name = np.full(slot_count, None, dtype=object)
        self._free = list(range(slot_count - 1, -1, -1))

    def written_run(self, group: int, names: Sequence[BlockHash], start: int, stop: int) -> int:
        """Length of the leading run of ``names[start:stop]`` that can be promised, in blocks."""
        slot_of = self._slot_of[group]
        for position in range(start, stop):
            if names[position] not in slot_of:
                stop = position
                break
        if not self._planned_count:
            return stop - start
        slots = [slot_of[name] for name in names[start:stop]]
        unwritten = np.flatnonzero(self._states[slots] != SlotState.WRITTEN)
        return int(unwritten[0]) if len(unwritten) else stop - start

    def written(self, group: int) -> dict[BlockHash, int]:
        """The slots of all blocks that can be promised, by name. A copy, for tests and audits."""
        state = self._state
        slot_of = self._slot_of[group]
        return {n: slot for n, slot in slot_of.items() if state[slot] == SlotState.WRITTEN}

    def holds(self, group: int, name: BlockHash) -> bool:
        """Whether a slot has this block or is about to."""
        return name in self._slot_of[group]

    def has_written(self, group: int, names: Iterable[BlockHash]) -> bool:
        """Whether all of these blocks can be promised."""
        state, slots = self._state, map(self._slot_of[group].get, names)
        return all(slot is not None and state[slot] == SlotState.WRITTEN for slot in slots)

    def unheld(self, columns: Columns) -> Columns:
        """The rows whose block no slot has or is about to have, each name once."""
        slot_of, names = self._slot_of[columns.group], columns.names
        left = columns
        if not slot_of.keys().isdisjoint(names):
            left = columns.only([name not in slot_of for name in names])
        if len(set(left.names)) < len(left):
            return left.only(first_of_each(left.names))
        return left

    def locate(
        self, group: int, names: Sequence[BlockHash]
    ) -> tuple[list[int], npt.NDArray[np.int32]]:
        """Slots and generations of written blocks. KeyError for one that is not written."""
        slot_of = self._slot_of[group]
        slots = [slot_of[name] for name in names]
        at = numbers(slots)
        unwritten = np.flatnonzero(self._states[at] != SlotState.WRITTEN)
        if len(unwritten):
            raise KeyError(names[unwritten[0]])
        return slots, self._generation[at]

    def plan(self, columns: Columns) -> Placed | None:
        """Give blocks slots to be captured into; ``None`` if there is none for any of them.

        Takes free slots, or evicts: first what the engine still holds, then what the policy says,
        and of a block's own chain only what is deeper: a deeper block is not worth a shallower one
        of the same prefix. Blocks without a slot are left out. None may be held already.
        """
        if len(self._free) >= len(columns):
            slots = self._take_free(len(columns))
        else:
            columns, slots = self._make_room(columns)
        if not slots:
            return None
        group, names = columns.group, columns.names
        at = numbers(slots)
        self._generation_count += 1
        self._states[at] = SlotState.PLANNED
        self._generation[at] = self._generation_count
        self._group[at] = group
        self._name[at] = np.fromiter(names, object, len(names))
        self._slot_of[group].update(zip(names, slots, strict=True))
        self._planned_count += len(slots)
        self._policy.add(columns.lives, columns.depths, slots)
        return Placed(columns, slots, self._generation_count)

    def acknowledge(self, placed: Placed) -> int:
        """Every rank has captured it: the slots may be promised.

        How many: fewer after a reset, or where the same block has another slot by now.
        """
        at = self._under_way(placed)
        if self._nameless and not self._nameless.keys().isdisjoint(placed.slots):
            return sum(self._acknowledge_one(placed, row) for row in range(len(placed)))
        self._states[at] = SlotState.WRITTEN
        self._planned_count -= len(at)
        return len(at)

    def disown(self, placed: Placed) -> None:
        """It comes late, or never: the same blocks may be given other slots.

        The slots stay planned until ``acknowledge`` or ``abandon``. What is acknowledged then
        counts if its block has no other slot by that time.
        """
        slot_of = self._slot_of[placed.columns.group]
        for name, slot in zip(placed.columns.names, placed.slots, strict=True):
            if slot_of.get(name) == slot:
                del slot_of[name]
                self._nameless[slot] = True

    def abandon(self, placed: Placed) -> None:
        """Some rank has not captured it: the slots are free again, and nothing was promised."""
        self._under_way(placed)
        self._release(placed.slots)

    def use(
        self, chain: int, group: int, names: Sequence[BlockHash], blocks: Sequence[int]
    ) -> None:
        """``chain`` begins with these blocks, head first, as far as they are written.

        ``blocks`` are those of the engine that hold the first of them already.
        """
        state, slots = self._state, list(map(self._slot_of[group].get, names))
        used = [
            (depth, slot)
            for depth, slot in enumerate(slots)
            if slot is not None and state[slot] == SlotState.WRITTEN
        ]
        self._policy.use(chain, [depth for depth, _ in used], [slot for _, slot in used])
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
                self._release([slot])

    def reset(self) -> None:
        """Forget every block.

        A slot that a worker may still write, or that is pinned, is found no more and goes free when
        that has ended.
        """
        self._nameless = dict.fromkeys(self._nameless, False)
        for slot_of in self._slot_of:
            slots = list(slot_of.values())
            slot_of.clear()
            written = [slot for slot in slots if self._state[slot] == SlotState.WRITTEN]
            planned = (slot for slot in slots if self._state[slot] == SlotState.PLANNED)
            self._nameless.update(dict.fromkeys(planned, False))
            self._states[written] = SlotState.DOOMED
            self._release([slot for slot in written if slot not in self._pins])

    def check(self) -> None:
        """Raise AssertionError unless states, names, pins and free slots add up."""
        states = list(self._state)
        assert sorted(self._free) == [s for s, st in enumerate(states) if st == SlotState.FREE]
        named: set[int] = set()
        for group, slot_of in enumerate(self._slot_of):
            for name, slot in slot_of.items():
                assert states[slot] in (SlotState.PLANNED, SlotState.WRITTEN), (slot, states[slot])
                assert (self._name[slot], self._group[slot]) == (name, group), slot
                named.add(slot)
        for slot, state in enumerate(states):
            assert (self._name[slot] is None) == (state == SlotState.FREE), slot
            assert state != SlotState.WRITTEN or slot in named, slot
            nameless = state == SlotState.PLANNED and slot not in named
            assert nameless == (slot in self._nameless), slot
        assert self._planned_count == states.count(SlotState.PLANNED)
        for slot, pins in self._pins.items():
            assert pins > 0, slot
            assert states[slot] in (SlotState.WRITTEN, SlotState.DOOMED), slot
        assert states.count(SlotState.DOOMED) <= len(self._pins), "doomed without a pin"

    def _take_free(self, count: int) -> list[int]:
        free = self._free
        start = len(free) - count
        slots = free[start:]
        del free[start:]
        slots.reverse()
        return slots

    def _make_room(self, columns: Columns) -> tuple[Columns, list[int]]:
        """Slots for as many of the blocks as there is room for, in their order."""
        self._evict_many(len(columns) - len(self._free), set(columns.lives))
        if len(self._free) >= len(columns):
            return columns, self._take_free(len(columns))
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
        resident = self.residency.choose_many(count, self._may_leave, self._keys_of)
        self._release(resident)
        others = self._policy.choose_many(count - len(resident), self._may_leave, spared)
        self._release(others)
        self.counts.evicted_resident += len(resident)
        self.counts.evicted += len(resident) + len(others)

    def _evict_own(self, life: int, depth: int) -> int | None:
        """A slot for a block at ``depth`` of ``life`` when all that is left is on such chains."""
        victim = self._policy.choose(
            lambda at, slot: (at.chain != life or at.depth > depth) and self._may_leave([slot])[0]
        )
        if victim is None:
            return None
        self.counts.evicted += 1
        self._release([victim])
        return self._free.pop()

    def _may_leave(self, slots: Sequence[int]) -> list[bool]:
        state, pins = self._state, self._pins
        return [state[slot] == SlotState.WRITTEN and slot not in pins for slot in slots]

    def _keys_of(self, slots: Sequence[int]) -> list[BlockKey]:
        at = numbers(slots)
        suffixes = [key_suffix(group) for group in range(len(self._slot_of))]
        rows = zip(self._name[at].tolist(), self._group[at].tolist(), strict=True)
        return [name + suffixes[group] for name, group in rows]

    def _under_way(self, placed: Placed) -> Numbers:
        """The slots of a capture whose end is reported for the first time."""
        at = numbers(placed.slots)
        same = self._generation[at] == placed.generation
        if not (same & (self._states[at] == SlotState.PLANNED)).all():
            raise RuntimeError(
                f"slots {placed.slots} are not on their way: settled twice or re-used"
            )
        return at

    def _acknowledge_one(self, placed: Placed, row: int) -> bool:
        """``acknowledge`` of one block, when its slot may have lost its name."""
        name, slot = placed.columns.names[row], placed.slots[row]
        slot_of = self._slot_of[placed.columns.group]
        if slot in self._nameless:
            if name in slot_of or not self._nameless[slot]:
                self._release([slot])
                return False
            del self._nameless[slot]
            slot_of[name] = slot
        self._state[slot] = SlotState.WRITTEN
        self._planned_count -= 1
        return True

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots that are planned, written or doomed, and forget what was said of them."""
        if not slots:
            return
        at = numbers(slots)
        rows = zip(self._group[at].tolist(), self._name[at].tolist(), slots, strict=True)
        for group, name, slot in rows:
            slot_of = self._slot_of[group]
            named = slot_of.pop(name, slot)
            if named != slot:
                slot_of[name] = named  # the name has been given to another slot
        if self._nameless:
            for slot in slots:
                self._nameless.pop(slot, None)
        self._planned_count -= int(np.count_nonzero(self._states[at] == SlotState.PLANNED))
        self._states[at] = SlotState.FREE
        self._name[at] = None
        self.residency.forget(slots)
        self._policy.remove(slots)
        self._free.extend(slots)
