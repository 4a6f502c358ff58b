"""Which blocks a step captures, and why.

*Fills* are blocks that this step's forward pass completes, *victims* those of a request it
preempts, *leavers* those that the engine is about to overwrite. Every one of them needs both
witnesses of the second law before it gets a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moonstep.config import CaptureMode, Settings
from moonstep.groups import Group, GroupKind, alignment_tokens, block_names
from moonstep.scheduler.allocations import whole_blocks
from moonstep.scheduler.columns import BlockKey, Columns, group_of_key
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.lookahead import Going, LookAhead
from moonstep.scheduler.slots import Placed
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
    """Collects the captures of one step at a time. Scheduler thread only.

    Fills and victims are blocks of full attention; windows and states have a planner of their own.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        index: HostIndex,
        witness: Witness,
        lookahead: LookAhead,
        stats: SchedulerStats,
    ) -> None:
        self._groups = {group.index: group for group in groups}
        self._dense = [g for g in groups if g.kind is GroupKind.FULL_ATTENTION]
        # With windows or states the engine may hold a block and yet be unable to resume there.
        self._engine_resumes = len(self._dense) == len(groups)
        # Beyond the last boundary the engine names nothing, and no hit could use it.
        self._align_tokens = alignment_tokens(groups)
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
        for group in self._dense:
            if mode is CaptureMode.LAZY:
                self._pass(trackers, group)
                continue
            columns = self._filled(trackers, group)
            if not columns:
                continue
            keys = columns.keys()
            if not self._witness.pool_agrees(columns.blocks, keys):
                vouched = self._witness.vouched(columns, keys)
                self._stats.unvouched_blocks += len(columns) - len(vouched)
                columns = vouched
            self._capture(self._index.unheld(columns), engine_keeps=self._engine_resumes)

    def victims(self, trackers: Sequence[RequestTracker], budget_bytes: int) -> None:
        """Capture what preempted lives had computed, head first, as far as it is still intact.

        The engine freed their blocks in this very step; most still carry name and content.
        """
        for tracker in trackers:
            for group in self._dense:
                columns = _computed(tracker, group)
                vouched = self._witness.vouched(columns, columns.keys())
                wanted = self._index.unheld(vouched)
                wanted = wanted.part(0, budget_bytes // group.block_bytes)
                budget_bytes -= len(wanted) * group.block_bytes
                self._capture(wanted, engine_keeps=False)

    def leftovers(self, held: Sequence[Columns]) -> None:
        """Capture blocks that ended requests left, and that are held for it.

        The engine kept no name for them; that they were the request's own, and are held since, is
        the first witness.
        """
        for columns in held:
            self._witness.saw_computed(columns)
            self._capture(self._index.unheld(columns), engine_keeps=False)

    def leavers(self, budget_bytes: int) -> None:
        """Capture what the engine may overwrite in its next step and the host cache has not.

        The engine gives up tails before heads. Where there is no room for all, heads matter.
        """
        if not self._index.slot_count:
            return
        going = self._lookahead.next_to_go()
        if not going.blocks:
            return
        for index, (blocks, keys) in _by_group(going, self._groups).items():
            block_bytes = self._groups[index].block_bytes
            computed = self._witness.computed(index, blocks, keys)
            # What was left to the engine was to be kept, though another life may pass it by.
            self._index.keep(index, computed.names)
            wanted = self._index.unheld(computed)
            room = budget_bytes // block_bytes
            if len(wanted) > room:
                self._lookahead.look_again(wanted.blocks[room:])
                wanted = wanted.part(0, room)
            budget_bytes -= len(wanted) * block_bytes
            if len(wanted) > self._index.free_count:
                wanted = wanted.by_depth()
            self._capture(wanted, engine_keeps=False)

    def _pass(self, trackers: Sequence[RequestTracker], group: Group) -> None:
        """Note how far each life has come, and nothing else: its blocks wait until they go."""
        if self._index.slot_count:
            for tracker in trackers:
                stop = whole_blocks(tracker, group, self._align_tokens)
                if stop > tracker.next_block[group.index]:
                    tracker.next_block[group.index] = stop

    def _filled(self, trackers: Sequence[RequestTracker], group: Group) -> Columns:
        """The blocks that became whole since each life was last looked at."""
        columns = Columns(group.index)
        index, units, align_tokens = group.index, group.units, self._align_tokens
        is_sized = self._index.slot_count > 0
        for tracker in trackers:
            first, stop = tracker.next_block[index], whole_blocks(tracker, group, align_tokens)
            if stop <= first:
                continue
            hashes, table = tracker.request.block_hashes, tracker.tables.by_group[index]
            if stop == first + 1:
                columns.add(tracker.life, first, hashes[stop * units - 1], table[first])
            else:
                names = block_names(hashes, group, first, stop)
                columns.add_run(tracker.life, first, names, table[first:stop])
            if is_sized:
                tracker.next_block[index] = stop
        return columns

    def _capture(self, columns: Columns, *, engine_keeps: bool) -> None:
        """Give slots to blocks that have none (``unheld``), as far as there is room for them."""
        if not self._index.slot_count:
            return
        placed = self._index.plan(columns)
        if placed is not None:
            self._captures.append(Capture(placed, engine_keeps))


def _by_group(
    going: Going, groups: Collection[int]
) -> Mapping[int, tuple[Sequence[int], Sequence[BlockKey]]]:
    """Blocks and their keys, by the one of ``groups`` that the keys name."""
    if len(groups) == 1:
        return dict.fromkeys(groups, (going.blocks, going.keys))
    by_group: dict[int, tuple[list[int], list[BlockKey]]] = {g: ([], []) for g in groups}
    for block, key in zip(going.blocks, going.keys, strict=True):
        blocks, keys = by_group[group_of_key(key)]
        blocks.append(block)
        keys.append(key)
    return by_group


def _computed(tracker: RequestTracker, group: Group) -> Columns:
    """All blocks a life has had whole, from its first."""
    columns = Columns(group.index)
    names = block_names(tracker.request.block_hashes, group, 0, tracker.next_block[group.index])
    table = tracker.tables.by_group[group.index]
    columns.add_run(tracker.life, 0, names, table[: len(names)])
    return columns


def capture_mode(settings: Settings, groups: Sequence[Group]) -> CaptureMode:
    """Eager beside windows and states, unless the user says otherwise.

    A block that the engine still holds comes back from nowhere if its window has gone.
    """
    is_dense = all(group.kind is GroupKind.FULL_ATTENTION for group in groups)
    return settings.capture_mode if is_dense or settings.capture else CaptureMode.EAGER
