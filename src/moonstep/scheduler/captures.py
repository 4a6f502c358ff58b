"""Which blocks a step captures, and why.

*Fills* are blocks that this step's forward pass completes, *victims* those of a request it
preempts, *leavers* those that the engine is about to overwrite. Every one of them needs both
witnesses of the second law before it gets a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.config import CaptureMode
from moonstep.engine import BlockHash
from moonstep.groups import Group
from moonstep.scheduler.columns import Columns, split_key
from moonstep.scheduler.index import HostIndex, Placed
from moonstep.scheduler.lookahead import LookAhead
from moonstep.scheduler.stats import SchedulerStats
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.witness import Witness


@dataclass(frozen=True, slots=True)
class Capture:
    """Blocks on their way into slots. ``engine_keeps`` them for now: a copy is worth little."""

    placed: Placed
    engine_keeps: bool

    def __len__(self) -> int:
        return len(self.placed)


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

    def fills(self, trackers: Sequence[RequestTracker], mode: CaptureMode) -> None:
        """Note what this step completes of these lives' blocks; capture it if ``mode`` says so.

        Before the ranks have reported their slots, the same blocks are looked at again next time.
        """
        for group in self._groups:
            columns = self._filled(trackers, group)
            if not columns:
                continue
            keys = columns.keys()
            self._witness.saw_computed(columns.blocks, keys, columns.lives, columns.depths)
            if mode is CaptureMode.LAZY:
                continue
            if not self._witness.pool_agrees(columns.blocks, keys):
                agreed = map(self._witness.vouches, columns.blocks, keys)
                vouched = columns.only(agreed)
                self._stats.unvouched_blocks += len(columns) - len(vouched)
                columns = vouched
            self._capture(columns, engine_keeps=True)

    def victims(self, trackers: Sequence[RequestTracker], budget_bytes: int) -> None:
        """Capture what preempted lives had computed, head first, as far as it is still intact.

        The engine freed their blocks in this very step; most still carry name and content.
        """
        for tracker in trackers:
            for group in self._groups:
                columns = _computed(tracker, group)
                vouched = columns.only(map(self._witness.vouches, columns.blocks, columns.keys()))
                wanted = self._index.unheld(vouched).head(budget_bytes // group.block_bytes)
                budget_bytes -= len(wanted) * group.block_bytes
                self._capture(wanted, engine_keeps=False)

    def leftovers(self, held: Sequence[Columns]) -> None:
        """Capture blocks that ended requests left, and that are held for it.

        The engine kept no name for them; that they were the request's own, and are held since, is
        the first witness.
        """
        for columns in held:
            self._witness.saw_computed(
                columns.blocks, columns.keys(), columns.lives, columns.depths
            )
            self._capture(columns, engine_keeps=False)

    def leavers(self, budget_bytes: int) -> None:
        """Capture what the engine may overwrite in its next step and the host cache has not."""
        if not self._index.slot_count:
            return
        going: list[tuple[int, int, int, BlockHash, int]] = []
        for block, key in self._lookahead.next_to_go():
            name, group = split_key(key)
            if self._index.holds(group, name):
                continue
            place = self._witness.place_of(block, key)
            if place is None:
                continue
            budget_bytes -= self._groups[group].block_bytes
            if budget_bytes < 0:
                self._lookahead.look_again((block,))
                break
            going.append((place.depth, place.chain, group, name, block))
        # The engine gives up tails before heads. Where there is no room for all, heads matter.
        by_group: dict[int, Columns] = {}
        for depth, life, group, name, block in sorted(going):
            columns = by_group.setdefault(group, Columns(group))
            columns.add(life, depth, name, block)
        for columns in by_group.values():
            # The engine gives up the tail of a prefix first; where slots are few, its head counts.
            self._capture(columns.shallowest_first(), engine_keeps=False)

    def _filled(self, trackers: Sequence[RequestTracker], group: Group) -> Columns:
        """The blocks that became whole since each life was last looked at."""
        columns = Columns(group.index)
        index, block_tokens = group.index, group.block_tokens
        for tracker in trackers:
            names = tracker.request.block_hashes
            first = tracker.next_block[index]
            stop = min(tracker.token_len // block_tokens, len(names))
            if stop <= first:
                continue
            table = tracker.tables.by_group[index]
            if stop == first + 1:
                columns.add(tracker.life, first, names[first], table[first])
            else:
                columns.add_run(tracker.life, first, names[first:stop], table[first:stop])
            if self._index.slot_count:
                tracker.next_block[index] = stop
        return columns

    def _capture(self, columns: Columns, *, engine_keeps: bool) -> None:
        """Give slots to those blocks that have none, as far as there is room for them."""
        if not self._index.slot_count:
            return
        placed = self._index.plan(self._index.unheld(columns))
        if placed is not None:
            self._captures.append(Capture(placed, engine_keeps))


def _computed(tracker: RequestTracker, group: Group) -> Columns:
    """All blocks a life has had whole, from its first."""
    columns = Columns(group.index)
    names = tracker.request.block_hashes
    stop = min(tracker.next_block[group.index], len(names))
    table = tracker.tables.by_group[group.index]
    columns.add_run(tracker.life, 0, names[:stop], table[:stop])
    return columns
