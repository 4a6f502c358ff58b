"""Windows and states: which of their blocks a step captures, and which of it is given up again.

A window's blocks are read by nobody once it has moved on, and the engine names few of them; a state
exists only where the engine hands one over. So they are kept at few boundaries for good, and at the
last ones a running life has reached for as long as it may have to come back to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moonstep.config import CaptureMode
from moonstep.engine import (
    Block,
    BlockHash,
    BlockState,
    CacheManager,
    Request,
    SchedulerOutput,
)
from moonstep.groups import Group, GroupKind, block_names, hit_blocks
from moonstep.scheduler.boundaries import Boundaries
from moonstep.scheduler.captures import Capture
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.stats import SchedulerStats
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.trail import Trail
from moonstep.scheduler.witness import Witness


class SparsePlanner:
    """Collects the captures of windows and states, one step at a time. Scheduler thread only.

    Without recurrent groups a life can be resumed at every boundary, so its window rolls with it.
    With them it can only where the engine hands over a state, and windows are captured there.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        boundaries: Boundaries,
        index: HostIndex,
        witness: Witness,
        stats: SchedulerStats,
    ) -> None:
        self._windows = [g for g in groups if g.kind is GroupKind.SLIDING_WINDOW]
        self._states = [g for g in groups if g.kind is GroupKind.RECURRENT_STATE]
        self.groups = [*self._windows, *self._states]
        self.boundaries = boundaries
        self._index = index
        self._witness = witness
        self._stats = stats
        self._manager: CacheManager | None = None
        self.mode = CaptureMode.EAGER
        self._captures: list[Capture] = []
        self._reached: list[tuple[Request, int]] = []
        self._early: list[tuple[RequestTracker, int, Mapping[int, int]]] = []

    @property
    def takes_states(self) -> bool:
        """Whether there are recurrent groups, whose states are handed over."""
        return bool(self._states)

    def bind(self, manager: CacheManager) -> None:
        """Take the engine's tables as a witness of blocks that its pool keeps no name for."""
        self._manager = manager

    def begin(self, tracker: RequestTracker, start_tokens: int) -> None:
        """A life begins, with so many tokens computed."""
        if self.groups:
            of_request = self.boundaries.of_request(tracker.request)
            start, unit = self.boundaries.below(start_tokens), self.boundaries.unit_tokens
            tracker.trail = Trail(of_request, start, unit)

    def passed(
        self, tracker: RequestTracker, group: Group, computed_tokens: int
    ) -> tuple[Sequence[BlockHash], Sequence[int] | None]:
        """A life begins beyond these blocks: names of those that may have slots, where they stand.

        Of a window or a state only those that a boundary needs; else all, from the first on. They
        are kept from now on, if another life keeps them in passing, or is about to.
        """
        hashes, stop = tracker.request.block_hashes, computed_tokens // group.block_tokens
        if tracker.trail is None or group.kind is GroupKind.FULL_ATTENTION:
            return block_names(hashes, group, 0, stop), None
        stop = min(stop, len(hashes) // group.units)
        near = hit_blocks(group, self.boundaries.below(computed_tokens))
        kept = self.boundaries.kept_positions(group, 0, stop, tracker.trail.of_request)
        at = sorted({*kept, *near}.intersection(range(stop)))
        names = _names(tracker, group, at)
        self._index.keep(group.index, names)
        return names, at

    def take(self) -> list[Capture]:
        """The captures planned since the last call."""
        captures, self._captures = self._captures, []
        return captures

    def take_reached(self) -> list[tuple[Request, int]]:
        """Boundaries at which something is kept for good, reached since the last call."""
        reached, self._reached = self._reached, []
        return reached

    # Windows that roll.

    def fills(self, trackers: Sequence[RequestTracker]) -> None:
        """Capture what this step completes of these lives' windows, and give up what they left.

        Before the ranks have reported their slots, the same blocks are looked at again next time.
        """
        if not self.groups or not self._index.slot_count:
            return
        for group in self._windows:
            kept, passing = Columns(group.index), Columns(group.index)
            for tracker in trackers:
                if not self._states:
                    self._fill(tracker, group, kept, passing)
                self._went_on(tracker, group)
            self._keep(kept)
            self._pass_by(passing, trackers)
        for tracker in trackers:
            if not self._states:
                self._reach(tracker, _named_tokens(tracker, self._windows[0]))
            for group in self._states:
                self._went_on(tracker, group)

    def _reach(self, tracker: RequestTracker, named_tokens: int) -> None:
        """A life whose window rolls can be resumed at every boundary up to here."""
        trail = tracker.trail
        if trail is not None:
            last, reached = trail.last_tokens, self.boundaries.below(named_tokens)
            stored = self.boundaries.stored_between(last, reached, trail.of_request)
            self._reached += [(tracker.request, boundary) for boundary in stored]
            trail.reach(reached)

    def _went_on(self, tracker: RequestTracker, group: Group) -> None:
        stop = self._whole_blocks(tracker, group)
        if stop > tracker.next_block[group.index]:
            tracker.next_block[group.index] = stop

    def _whole_blocks(self, tracker: RequestTracker, group: Group) -> int:
        """Blocks up to the last boundary that is settled; what lies behind it no hit could use."""
        return self.boundaries.below(_named_tokens(tracker, group)) // group.block_tokens

    def _fill(self, tracker: RequestTracker, group: Group, kept: Columns, passing: Columns) -> None:
        """Sort a life's new blocks of a window into those kept for good and those in passing."""
        first, stop = tracker.next_block[group.index], self._whole_blocks(tracker, group)
        trail = tracker.trail
        if stop <= first or trail is None:
            return
        self._index.give_up(group.index, _names(tracker, group, trail.left_behind(group)))
        reached = self.boundaries.below(_named_tokens(tracker, self._windows[0]))
        wanted = self.boundaries.kept_positions(group, first, stop, trail.of_request)
        near = max(first, hit_blocks(group, reached).start)
        for_good = set(wanted)
        self._add(tracker, group, wanted, kept)
        self._add(tracker, group, [p for p in range(near, stop) if p not in for_good], passing)

    def _add(
        self, tracker: RequestTracker, group: Group, positions: Sequence[int], columns: Columns
    ) -> None:
        """Add a life's blocks at these positions, as far as the engine vouches for them."""
        table = tracker.tables.by_group[group.index]
        stands = self._standing(tracker, group)
        for position, name in zip(positions, _names(tracker, group, positions), strict=True):
            block = table[position]
            if stands(position, block, name):
                columns.add(tracker.life, position, name, block)
            else:
                self._stats.unvouched_blocks += 1

    def _standing(self, tracker: RequestTracker, group: Group) -> _Standing:
        return _Standing(self._witness, self._manager, tracker.request_id, group)

    # States that are handed over.

    def handed_over(self, output: SchedulerOutput, lives: Mapping[str, RequestTracker]) -> None:
        """Capture the states that this step leaves at a boundary, and the windows before it."""
        state: BlockState | None = getattr(output, "kv_connector_block_state", None)
        if state is None or not self._states:
            return
        if self._early and self._index.slot_count:
            early, self._early = self._early, []
            for life, boundary, blocks in early:
                if lives.get(life.request_id) is life and life.saves and life.trail:
                    self._hand_over(life, life.trail, boundary, blocks)
        for request_id, handed in state.boundary_state_offloads.items():
            tracker = lives.get(request_id)
            tokens = output.num_scheduled_tokens.get(request_id)
            if tracker is None or tracker.trail is None or tokens is None or not tracker.saves:
                continue
            request = tracker.request
            settled = min(request.num_computed_tokens + tokens, request.num_tokens)
            for boundary, blocks in _by_boundary(handed):
                if 0 < boundary <= settled and boundary % self.boundaries.align_tokens == 0:
                    self._hand_over(tracker, tracker.trail, boundary, blocks)

    def _hand_over(
        self, tracker: RequestTracker, trail: Trail, boundary: int, blocks: Mapping[int, int]
    ) -> None:
        """Capture all that a resume at ``boundary`` reads, or nothing.

        Before the ranks have reported their slots, it is tried again once they have.
        """
        if not self._index.slot_count:
            self._early.append((tracker, boundary, blocks))
            return
        parts: list[Columns] = []
        for group in self.groups:
            columns = self._at(tracker, group, boundary, blocks)
            if columns is None:
                self._stats.unvouched_blocks += 1
                return
            parts.append(columns)
        is_kept = self.boundaries.is_kept(boundary, trail.of_request)
        if is_kept:
            self._reached.append((tracker.request, boundary))
        trail.reach(boundary)
        for group, columns in zip(self.groups, parts, strict=True):
            if is_kept:
                self._keep(columns)
            else:
                self._pass_by(columns, [tracker])
            self._index.give_up(group.index, _names(tracker, group, trail.left_behind(group)))

    def _at(
        self, tracker: RequestTracker, group: Group, boundary: int, states: Mapping[int, int]
    ) -> Columns | None:
        """A group's blocks that a resume at ``boundary`` reads; ``None`` if one is missing."""
        needed = hit_blocks(group, boundary)
        columns = Columns(group.index)
        names = block_names(tracker.request.block_hashes, group, needed.start, needed.stop)
        if len(names) < len(needed):
            return None
        is_state = group.kind is GroupKind.RECURRENT_STATE
        table = tracker.tables.by_group[group.index]
        stands = self._standing(tracker, group)
        for position, name in zip(needed, names, strict=True):
            if is_state:
                block = states.get(group.index, 0)
                there = self._witness.is_named(block, name + columns.suffix, in_use=True)
            else:
                block = table[position]
                there = stands(position, block, name)
            if there:
                columns.add(tracker.life, position, name, block)
            elif not self._index.holds(group.index, name):
                return None
        return columns

    # Both.

    def end(self, trackers: Iterable[RequestTracker]) -> None:
        """These lives have ended for good; see ``finished``."""
        for tracker in trackers:
            self.finished(tracker)

    def finished(self, tracker: RequestTracker) -> None:
        """A life has ended for good: what it ended on is kept, what it passed is given up.

        After the promises of the step have been taken over: they may be of what is given up.
        """
        trail = tracker.trail
        if trail is None or not tracker.saves:
            return
        if not self._states:
            self._reach(tracker, end_tokens(tracker.request))
        stored = self.boundaries.stored_below(trail.last_tokens)
        if stored and stored < trail.last_tokens and not self._states:
            self._reached.append((tracker.request, stored))
        if self.boundaries.unit_tokens:
            self._reached.append((tracker.request, trail.last_tokens))
        for group in self.groups:
            # The last block of a window may still be on its way; a state counts whole or not at all
            passed = trail.let_go(group) if self._states else trail.left_behind(group)
            self._index.give_up(group.index, _names(tracker, group, passed))
            self._index.keep(group.index, _names(tracker, group, trail.passing[group.index]))

    def _keep(self, columns: Columns) -> None:
        """Keep these for good. What the engine has a name for can wait until it lets go of it."""
        if not columns:
            return
        keys = columns.keys()
        self._witness.saw_computed(columns)
        self._index.keep(columns.group, columns.names)
        if self.mode is CaptureMode.LAZY:
            pairs = zip(columns.blocks, keys, strict=True)
            columns = columns.only(not self._witness.is_named(block, key) for block, key in pairs)
        placed = self._index.plan(self._index.unheld(columns))
        if placed is not None:
            self._captures.append(Capture(placed, engine_keeps=False))

    def _pass_by(self, columns: Columns, trackers: Iterable[RequestTracker]) -> None:
        """Keep these until their lives have moved on."""
        placed = self._index.plan(self._index.unheld(columns))
        if placed is None:
            return
        self._index.pass_by(placed.slots)
        trails = {tracker.life: tracker.trail for tracker in trackers}
        for life, position in zip(placed.columns.lives, placed.columns.depths, strict=True):
            trail = trails[life]
            assert trail is not None
            trail.pass_by(columns.group, position)
        self._captures.append(Capture(placed, engine_keeps=False))


def end_tokens(request: Request) -> int:
    """Tokens of an ended request that are computed, or will be before the next step's captures."""
    return min(request.num_computed_tokens, request.num_tokens)


def _named_tokens(tracker: RequestTracker, group: Group) -> int:
    """Settled tokens, as far as the engine has hashed them."""
    return min(tracker.token_len, len(tracker.request.block_hashes) * group.hash_tokens)


def _names(tracker: RequestTracker, group: Group, positions: Sequence[int]) -> Sequence[BlockHash]:
    """Names of a life's blocks at these positions, ascending."""
    if not positions:
        return ()
    first, stop = positions[0], positions[-1] + 1
    names = block_names(tracker.request.block_hashes, group, first, stop)
    return [names[position - first] for position in positions]


def _by_boundary(handed: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, dict[int, int]]]:
    """Boundaries that states are handed over at, ascending: the block of each group there."""
    blocks: dict[int, dict[int, int]] = {}
    for group, block, boundary in handed:
        blocks.setdefault(boundary, {})[group] = block
    return iter(sorted(blocks.items()))


class _Standing:
    """Whether blocks stand where a life's table has them, by the engine's own word."""

    def __init__(
        self, witness: Witness, manager: CacheManager | None, request_id: str, group: Group
    ) -> None:
        self._witness = witness
        self._manager = manager
        self._request_id = request_id
        self._group = group
        self._table: Sequence[Block] | None = None

    def __call__(self, position: int, block: int, name: bytes) -> bool:
        """By name if the pool has one for the block, else by the engine's table of this moment."""
        if not block:
            return False
        key = self._witness.name_of(block)
        if key is not None:
            return key == name + self._group.index.to_bytes(4, "big")
        if self._table is None:
            if self._manager is None:
                return False
            self._table = self._manager.get_blocks(self._request_id).blocks[self._group.index]
        return position < len(self._table) and self._table[position].block_id == block
