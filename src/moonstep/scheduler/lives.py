"""Lives: which requests run, since when, and on which blocks, as this step's output says.

A life begins when a step lists its request as new or as resumed, and ends when a step says that the
request was preempted or has finished. Nothing else is remembered about preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from typing import Final

from moonstep.engine import CachedRequests, Request, SchedulerOutput
from moonstep.groups import Group
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.tracker import RequestTracker

_MOST_REMEMBERED: Final = 256


class Lives:
    """The trackers of all running requests, by request id. Scheduler thread only."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.by_id: dict[str, RequestTracker] = {}
        self._groups = tuple(groups)
        self._count = 0
        self.request_of: dict[int, Request] = {}
        """The requests of the lives that began last, ended ones among them."""

    def new_number(self) -> int:
        """A number that no life had before; also for a load that precedes its life."""
        self._count += 1
        return self._count

    def end(self, request_id: str) -> RequestTracker | None:
        """End the request's life, if it has one."""
        return self.by_id.pop(request_id, None)

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
        computed = [num_computed_tokens // group.block_tokens for group in self._groups]
        tables = BlockTables(block_ids)
        tracker = RequestTracker(self.new_number(), request, tables, computed, saves=saves)
        self.by_id[request.request_id] = tracker
        self.request_of[tracker.life] = request
        if len(self.request_of) > _MOST_REMEMBERED + 2 * len(self.by_id):
            del self.request_of[next(iter(self.request_of))]
        return tracker

    def extend(self, cached: CachedRequests) -> list[int]:
        """Append this step's new blocks to the tables of running requests; answer with all of them.

        Resumed requests are passed over: their lists are whole tables and began a life.
        """
        if _no_new_blocks(cached):
            return []
        resumed, new_block_ids = cached.resumed_req_ids, cached.new_block_ids
        growing = compress(cached.req_ids, new_block_ids)
        pairs = zip(growing, filter(None, new_block_ids), strict=True)
        grown = [pair for pair in pairs if pair[0] not in resumed]
        by_id = self.by_id
        for request_id, block_ids in grown:
            tracker = by_id.get(request_id)
            if tracker is not None:
                tracker.tables.append(block_ids)
        return list(chain.from_iterable(chain.from_iterable(ids for _, ids in grown)))


def changes_nothing(output: SchedulerOutput) -> bool:
    """Whether no life begins or ends with this step, and no table changes."""
    cached = output.scheduled_cached_reqs
    return not (
        output.finished_req_ids
        or output.scheduled_new_reqs
        or output.preempted_req_ids
        or cached.resumed_req_ids
    ) and _no_new_blocks(cached)


def _no_new_blocks(cached: CachedRequests) -> bool:
    """Whether no running request got a block: one comparison an entry, in C."""
    return cached.new_block_ids.count(None) == len(cached.new_block_ids)


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
