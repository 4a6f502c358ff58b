"""The host-cache index: which block lives in which slot, and which slots may be promised.

The index alone decides; the workers obey. A slot goes free -> planned -> written -> free. It is
*planned* when a step's plan tells the workers to capture into it, and *written* once every rank has
reported that capture: only then is it found by a lookup. A *pinned* slot is promised to a load that
takes several steps and stays as it is until that load lets go.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from moonstep.engine import BlockHash
from moonstep.scheduler.checks import check_index
from moonstep.scheduler.columns import BlockKey, Columns, Numbers, keys_of, numbers
from moonstep.scheduler.policies import EvictionPolicy
from moonstep.scheduler.residency import Residency
from moonstep.scheduler.runs import written_run
from moonstep.scheduler.slots import FREE, PLANNED, WRITTEN, IndexCounts, Placed, SlotState


class HostIndex:
    """Names of blocks to slots, for every group. Scheduler thread only; moves slots only in a step.

    It has no slots until ``resize`` was called, so nothing is planned or found before that.

    ``strides`` are, where the groups' blocks differ in length, how many steps of depth one block of
    each group is, so that blocks of all groups stand in one order of depth on their chain.
    """

    def __init__(
        self,
        group_count: int,
        policy: EvictionPolicy,
        residency: Residency | None = None,
        strides: Sequence[int] = (),
    ) -> None:
        self.counts = IndexCounts()
        self.residency = residency or Residency()
        self._policy = policy
        self._strides = tuple(strides) or (1,) * group_count
        self._passing: set[int] = set()
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
        return written_run(self, group, names, start, stop)

    def which_held(self, group: int, names: Iterable[BlockHash]) -> Iterable[bool]:
        """For each of these blocks, whether a slot has it or is about to."""
        return map(self._slot_of[group].__contains__, names)

    def which_written(self, group: int, names: Iterable[BlockHash]) -> list[bool]:
        """For each of these blocks, whether it can be promised."""
        state, slots = self._state, map(self._slot_of[group].get, names)
        return [slot is not None and state[slot] == WRITTEN for slot in slots]

    def written(self, group: int) -> dict[BlockHash, int]:
        """The slots of all blocks that can be promised, by name. A copy, for tests and audits."""
        state, slot_of = self._state, self._slot_of[group]
        return {n: slot for n, slot in slot_of.items() if state[slot] == WRITTEN}

    def holds(self, group: int, name: BlockHash) -> bool:
        """Whether a slot has this block or is about to."""
        return name in self._slot_of[group]

    def has_written(self, group: int, names: Iterable[BlockHash]) -> bool:
        """Whether all of these blocks can be promised."""
        return all(self.which_written(group, names))

    def unheld(self, columns: Columns) -> Columns:
        """The rows whose block no slot has or is about to have, each name once."""
        slot_of, left = self._slot_of[columns.group], columns
        if not slot_of.keys().isdisjoint(left.names):
            left = columns.only([name not in slot_of for name in columns.names])
        if len(set(left.names)) < len(left):
            return left.first_of_each()
        return left

    def locate(
        self, group: int, names: Sequence[BlockHash]
    ) -> tuple[list[int], npt.NDArray[np.int32]]:
        """Slots and generations of written blocks. KeyError for one that is not written."""
        slot_of = self._slot_of[group]
        slots = [slot_of[name] for name in names]
        at = numbers(slots)
        unwritten = np.flatnonzero(self._states[at] != WRITTEN)
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
        self._states[at] = PLANNED
        self._generation[at] = self._generation_count
        self._group[at] = group
        self._name[at] = np.fromiter(names, object, len(names))
        self._slot_of[group].update(zip(names, slots, strict=True))
        self._planned_count += len(slots)
        self._policy.add(columns.lives, self._depths(group, columns.depths), at)
        return Placed(columns, slots, self._generation_count, at)

    def acknowledge(self, placed: Placed) -> int:
        """Every rank has captured it: the slots may be promised.

        How many: fewer after a reset, or where the same block has another slot by now.
        """
        at = self._under_way(placed)
        if self._nameless and not self._nameless.keys().isdisjoint(placed.slots):
            return sum(self._acknowledge_one(placed, row) for row in range(len(placed)))
        self._states[at] = WRITTEN
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
        self,
        chain: int,
        group: int,
        names: Sequence[BlockHash],
        blocks: Sequence[int],
        positions: Sequence[int] | None = None,
    ) -> None:
        """``chain`` goes through these blocks, head first, as far as they are written.

        They are the first of its blocks, or those at ``positions``. ``blocks`` are the engine's
        that hold the first of all its blocks already (0: none does).
        """
        state, slots = self._state, map(self._slot_of[group].get, names)
        at = range(len(names)) if positions is None else positions
        used = [
            (depth, slot)
            for depth, slot in zip(at, slots, strict=True)
            if slot is not None and state[slot] == WRITTEN
        ]
        mine = [slot for _, slot in used]
        self._policy.use(chain, self._depths(group, [depth for depth, _ in used]), mine)
        if self._passing:
            self._passing.difference_update(mine)
        there = [(s, blocks[depth]) for depth, s in used if depth < len(blocks) and blocks[depth]]
        self.residency.note([slot for slot, _ in there], [block for _, block in there])

    def pass_by(self, slots: Iterable[int]) -> None:
        """What these slots were planned for is kept until ``give_up``, unless someone wants it."""
        self._passing.update(slots)

    def keep(self, group: int, names: Iterable[BlockHash]) -> None:
        """Whoever keeps these blocks in passing has to keep them from now on."""
        if self._passing:
            self._passing.difference_update(map(self._slot_of[group].get, names))

    def give_up(self, group: int, names: Iterable[BlockHash]) -> None:
        """Free the slots of these blocks as far as they are written and kept in passing.

        One that is pinned, or still on its way, stays, and leaves like any other.
        """
        slots = self._passing.intersection(map(self._slot_of[group].get, names))
        self._release([slot for slot in slots if self._may_go(slot)])

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
            written = [slot for slot in slots if self._state[slot] == WRITTEN]
            planned = (slot for slot in slots if self._state[slot] == PLANNED)
            self._nameless.update(dict.fromkeys(planned, False))
            self._states[written] = SlotState.DOOMED
            self._release([slot for slot in written if slot not in self._pins])

    def check(self) -> None:
        """Raise AssertionError unless states, names, pins and free slots add up."""
        check_index(self)

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
        depths = self._depths(columns.group, columns.depths)
        for life, depth in zip(columns.lives, depths, strict=True):
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
            lambda at, slot: (at.chain != life or at.depth > depth) and self._may_go(slot)
        )
        if victim is None:
            return None
        self.counts.evicted += 1
        self._release([victim])
        return self._free.pop()

    def _depths(self, group: int, positions: list[int]) -> list[int]:
        """Where blocks at these positions end, in steps of depth."""
        stride = self._strides[group]
        return positions if stride == 1 else [(at + 1) * stride - 1 for at in positions]

    def _may_go(self, slot: int) -> bool:
        return self._state[slot] == WRITTEN and slot not in self._pins

    def _may_leave(self, slots: Sequence[int]) -> list[bool]:
        """Which of these slots nobody needs as they are."""
        state, pins = self._state, self._pins
        return [state[slot] == WRITTEN and slot not in pins for slot in slots]

    def _keys_of(self, slots: Sequence[int]) -> list[BlockKey]:
        at = numbers(slots)
        groups = self._group[at].tolist() if len(self._slot_of) > 1 else None
        return keys_of(self._name[at].tolist(), groups)

    def _under_way(self, placed: Placed) -> Numbers:
        """The slots of a capture whose end is reported for the first time."""
        at = placed.at
        same = (self._generation[at] == placed.generation) & (self._states[at] == PLANNED)
        if not same.all():
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
        self._state[slot] = WRITTEN
        self._planned_count -= 1
        return True

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots that are planned, written or doomed, and forget what was said of them."""
        if not slots:
            return
        at = numbers(slots)
        states = self._states[at]
        if len(self._slot_of) == 1 and (states == WRITTEN).all():
            deque(map(self._slot_of[0].__delitem__, self._name[at].tolist()), 0)
        else:
            self._forget_names(at, slots)
            self._planned_count -= int(np.count_nonzero(states == PLANNED))
        if self._passing:
            self._passing.difference_update(slots)
        self._states[at] = FREE
        self._name[at] = None
        self.residency.forget(slots)
        self._policy.remove(at)
        self._free.extend(slots)

    def _forget_names(self, at: Numbers, slots: Sequence[int]) -> None:
        rows = zip(self._group[at].tolist(), self._name[at].tolist(), slots, strict=True)
        for group, name, slot in rows:
            slot_of = self._slot_of[group]
            named = slot_of.pop(name, slot)
            if named != slot:
                slot_of[name] = named  # the name has been given to another slot
        if self._nameless:
            for slot in slots:
                self._nameless.pop(slot, None)
