"""Lives: which requests run, since when, and on which blocks, as this step's output says.

A life begins when a step lists its request as new or as resumed, and ends when a step says that the
request was preempted or has finished. Nothing else is remembered about preemptions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import compress
from typing import Final, cast

from moonstep.engine import CachedRequests, Request, SchedulerOutput
from moonstep.groups import Group
from moonstep.scheduler.allocations import Grown, GrownLists
from moonstep.scheduler.decoders import Decoders
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.witness import NOBODY

_MOST_REMEMBERED: Final = 256


class Lives:
    """The trackers of all running requests, by request id. Scheduler thread only."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.by_id: dict[str, RequestTracker] = {}
        self.decoders = Decoders()
        self._groups = tuple(groups)
        self._count = 0
        self.request_of: dict[int, Request] = {}
        """The requests of the lives that began last, ended ones among them."""

    def new_number(self) -> int:
        """A number that no life had before; also for a load that precedes its life."""
        self._count += 1
        return self._count

    def computed_tokens(self, request_id: str) -> int | None:
        """How many tokens of the life under this id the engine counts as computed, if there is one.

        Placeholders and drafts among them; 0 if it was preempted.
        """
        tracker = self.by_id.get(request_id)
        return None if tracker is None else tracker.request.num_computed_tokens

    def end(self, request_id: str) -> RequestTracker | None:
        """End the request's life, if it has one."""
        tracker = self.by_id.pop(request_id, None)
        if tracker is not None and not tracker.is_followed:
            self.decoders.leave(request_id)
        return tracker

    def start(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_computed_tokens: int,
        *,
        saves: bool,
    ) -> RequestTracker:
        """Begin a life on these tables and no others; one under the same id must have ended."""
        if request.request_id in self.by_id:
            raise RuntimeError(f"request {request.request_id} has a life already")
        computed = [0] * (self._groups[-1].index + 1)  # groups that keep nothing have no number
        for group in self._groups:
            computed[group.index] = num_computed_tokens // group.block_tokens
        tables = BlockTables(block_ids)
        tracker = RequestTracker(self.new_number(), request, tables, computed, saves=saves)
        self.by_id[request.request_id] = tracker
        self.request_of[tracker.life] = request
        if len(self.request_of) > _MOST_REMEMBERED + 2 * len(self.by_id):
            del self.request_of[next(iter(self.request_of))]
        return tracker

    def let_decode(self, trackers: Sequence[RequestTracker]) -> list[RequestTracker]:
        """Follow these lives no more once they decode; those that are still to be looked at."""
        followed = []
        for tracker in trackers:
            if tracker.is_prefilling:
                followed.append(tracker)
                continue
            tracker.is_followed = False
            if len(tracker.sources) == 1:
                self.decoders.enter(tracker)
        return followed

    def extend(self, cached: CachedRequests) -> list[Grown]:
        """Append this step's new blocks to the tables of running requests; answer with all of them.

        Resumed requests are passed over: their lists are whole tables and began a life.
        """
        new_block_ids, resumed = cached.new_block_ids, cached.resumed_req_ids
        if new_block_ids.count(None) == len(new_block_ids):
            return []
        growing = list(compress(cached.req_ids, new_block_ids))
        new = list(filter(None, new_block_ids))
        seats = list(map(self.decoders.seat_of.get, growing))
        firsts = [ids[0] for ids in new]
        if not resumed and None not in seats and set(map(len, firsts)) == {1}:
            return [self.decoders.grew(cast("list[int]", seats), [block for (block,) in firsts])]
        return self._extend_each(zip(growing, new, seats, strict=True), resumed)

    def _extend_each(
        self,
        new: Iterable[tuple[str, Sequence[Sequence[int]], int | None]],
        resumed: Container[str],
    ) -> list[Grown]:
        """As ``extend``, where not every life that grows is one that decodes."""
        seats: list[int] = []
        blocks: list[int] = []
        grown = GrownLists([], [], [])
        for request_id, block_ids, seat in new:
            if request_id in resumed:
                continue
            if seat is not None and len(block_ids[0]) == 1:
                seats.append(seat)
                blocks.append(block_ids[0][0])
                continue
            if seat is not None:
                self.decoders.leave(request_id)
            tracker = self.by_id.get(request_id)
            if tracker is not None:
                _append(tracker, block_ids, grown)
            else:
                for ids in block_ids:
                    grown.note(ids, NOBODY, 0)
        seated = [self.decoders.grew(seats, blocks)] if seats else []
        return [Grown(*grown), *seated]


def _append(tracker: RequestTracker, block_ids: Sequence[Sequence[int]], grown: GrownLists) -> None:
    """Append a life's new blocks to its tables, and note them."""
    tables = tracker.tables.by_group
    for table, ids, source in zip(tables, block_ids, tracker.sources, strict=True):
        if len(ids) == 1:  # as in most steps
            grown.blocks.append(ids[0])
            grown.sources.append(source)
            grown.depths.append(len(table))
            table.append(ids[0])
        elif ids:
            grown.note(ids, source, len(table))
            table.extend(ids)


def changes_nothing(output: SchedulerOutput) -> bool:
    """Whether no life begins or ends with this step, and no table changes."""
    cached = output.scheduled_cached_reqs
    return not (
        output.finished_req_ids
        or output.scheduled_new_reqs
        or output.preempted_req_ids
        or cached.resumed_req_ids
        # One comparison for each running request, in C.
        or cached.new_block_ids.count(None) < len(cached.new_block_ids)
    )


def starts_of(output: SchedulerOutput) -> list[tuple[str, Sequence[Sequence[int]], int]]:
    """Request id, tables and computed tokens of every life that begins with this step.

    Runner V1 lists resumed requests among the cached ones, runner V2 among the new ones; either way
    ``resumed_req_ids`` is all there is to ask.
    """
    starts: list[tuple[str, Sequence[Sequence[int]], int]] = [
        (new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for request_id in cached.resumed_req_ids:
        at = cached.req_ids.index(request_id)
        starts.append((request_id, cached.new_block_ids[at] or (), cached.num_computed_tokens[at]))
    return starts
