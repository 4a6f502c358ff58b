"""Which blocks a step captures, and why.

*Fills* are blocks that this step's forward pass completes, *victims* those of a request it
preempts, *leavers* those that the engine is about to overwrite. Every one of them needs both
witnesses of the second law before it gets a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonstep.config import CaptureMode
from moonstep.groups import Group
from moonstep.scheduler.index import HostIndex, Placement
from moonstep.scheduler.lookahead import LookAhead
from moonstep.scheduler.policies import Place
from moonstep.scheduler.stats import SchedulerStats
from moonstep.scheduler.tracker import RequestTracker, full_blocks
from moonstep.scheduler.witness import BlockKey, Witness, block_key, split_key


class Capture(NamedTuple):
    """One block on its way into a slot. ``engine_keeps`` it for now: its copy is worth little."""

    placement: Placement
    block: int
    engine_keeps: bool


class Budget:
    """Bytes that may still be spent, on one rank in one step."""

    __slots__ = ("left_bytes",)

    def __init__(self, nbytes: int) -> None:
        self.left_bytes = nbytes

    def spend(self, nbytes: int) -> bool:
        """Take ``nbytes``, or leave everything as it was and answer False."""
        if nbytes > self.left_bytes:
            return False
        self.left_bytes -= nbytes
        return True


class CapturePlanner:
    """Collects the captures of one step at a time. Scheduler thread only."""

    def __init__(
        self,
        groups: Sequence[Group],
        index: HostIndex,
        witness: Witness,
        lookahead: LookAhead,
        stats: SchedulerStats,
    ) -> None:
        self._groups = tuple(groups)
        self._index = index
        self._witness = witness
        self._lookahead = lookahead
        self._stats = stats
        self._captures: list[Capture] = []

    def take(self) -> list[Capture]:
        """The captures planned since the last call."""
        captures, self._captures = self._captures, []
        return captures

    def fills(self, tracker: RequestTracker, mode: CaptureMode) -> None:
        """Note what this step completes of ``tracker``'s blocks; capture it if ``mode`` says so.

        Before the ranks have reported their slots, the same blocks are looked at again next time.
        """
        hashes = tracker.request.block_hashes
        for group in self._groups:
            first = tracker.next_block[group.index]
            stop = full_blocks(tracker.token_len, group.block_tokens, len(hashes))
            for position in range(first, stop):
                self._fill(tracker, group, position, mode)
            if self._index.slot_count and stop > first:
                tracker.next_block[group.index] = stop

    def victims(self, tracker: RequestTracker, budget: Budget) -> None:
        """Capture what a preempted life had computed, head first, as far as it is still intact.

        The engine freed its blocks in this very step, most of which still carry name and content.
        """
        hashes = tracker.request.block_hashes
        for group in self._groups:
            table = tracker.tables.by_group[group.index]
            for position in range(min(tracker.next_block[group.index], len(hashes))):
                key = block_key(hashes[position], group.index)
                if self._index.holds(group.index, hashes[position]):
                    continue
                if not self._witness.vouches(table[position], key):
                    continue
                if not budget.spend(group.block_bytes):
                    return
                place = Place(tracker.life, position)
                self._capture(place, key, table[position], engine_keeps=False)

    def leavers(self, budget: Budget) -> None:
        """Capture what the engine may overwrite in its next step and the host cache has not."""
        for block in self._index.residency.take_evicted():
            self._lookahead.look_again(block)
        for block, key in self._lookahead.next_to_go():
            name, group = split_key(key)
            if self._index.holds(group, name):
                continue
            place = self._witness.place_of(block, key)
            if place is None:
                continue
            affordable = budget.spend(self._groups[group].block_bytes)
            if not affordable or not self._capture(place, key, block, engine_keeps=False):
                self._lookahead.look_again(block)
                return

    def _fill(
        self, tracker: RequestTracker, group: Group, position: int, mode: CaptureMode
    ) -> None:
        name = tracker.request.block_hashes[position]
        block = tracker.tables.by_group[group.index][position]
        key = block_key(name, group.index)
        place = Place(tracker.life, position)
        self._witness.saw_computed(block, key, place)
        if mode is CaptureMode.LAZY or self._index.holds(group.index, name):
            return
        if self._witness.vouches(block, key):
            self._capture(place, key, block, engine_keeps=True)
        else:
            self._stats.unvouched_blocks += 1

    def _capture(self, place: Place, key: BlockKey, block: int, *, engine_keeps: bool) -> bool:
        name, group = split_key(key)
        if not self._index.slot_count:
            return False
        placement = self._index.plan(place, group, name)
        if placement is None:
            return False
        self._captures.append(Capture(placement, block, engine_keeps))
        return True
