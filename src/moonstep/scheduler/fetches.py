"""Fetches: what the store has for a request that arrives, brought into slots before it is promised.

Looking starts when a request arrives. While its bytes are on their way the answer is *pending*, for
a bounded number of requests and until a deadline counted from the arrival; then the promise is what
has come. One look and one plan a request: what failed is not asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple, Protocol

from moonstep.engine import BlockHash, Request
from moonstep.groups import last_boundary_tokens
from moonstep.keys import Key, KeyMaker
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.jobs import OpenJob
from moonstep.scheduler.misses import NOTHING_FOUND, Look, MissReason
from moonstep.scheduler.objects import ObjectNames, ObjectShape, objects_of
from moonstep.scheduler.pace import FetchPace
from moonstep.scheduler.slots import Placed
from moonstep.wire import SCRATCH, StoredObject

OBJECTS_PER_JOB: Final = 4


class StoreLookup(Protocol):
    """Asks a store what it has, off the scheduler's thread. Neither verb blocks."""

    def ask(self, ticket: int, keys: Sequence[Key]) -> None:
        """Look for these keys; the answer comes under ``ticket``, or never."""

    def answers(self) -> list[tuple[int, list[bool]]]:
        """What has been found since the last call; nothing for a look that failed."""


class FetchState(Enum):
    """How far the look for a request's prefix has come."""

    LOOKING = "looking"
    FOUND = "found"
    FETCHING = "fetching"
    OVER = "over"


@dataclass(slots=True)
class Arrival:
    """A request that has arrived and was not admitted yet."""

    request: Request
    deadline_s: float
    first: int
    state: FetchState = FetchState.LOOKING
    present: int = 0
    """Objects of its prefix that the host cache or the store has, from the first; before the store
    has answered, those that it may have."""
    reason: MissReason | None = None
    """Why some of them will not come; ``None`` while they may."""
    jobs: set[int] = field(default_factory=set)
    asked_tokens: int = 0
    """What its own jobs are to bring, and since when; 0 when it has none any more."""
    started_s: float = 0.0
    came_tokens: int = 0
    held: list[int] = field(default_factory=list)
    """Slots that came for it, pinned until it is admitted."""


class Fetched(NamedTuple):
    """What a fetch job brings: the new slots of each of its objects, and for whom."""

    arrival: Arrival
    parts: list[Placed]


@dataclass(slots=True)
class FetchCounts:
    """What fetching has come to since the start."""

    looks: int = 0
    started_objects: int = 0
    fetched_objects: int = 0
    missed_objects: int = 0
    abandoned_jobs: int = 0
    pending_answers: int = 0


class FetchPlanner:
    """Arrivals and what is being brought for them. Scheduler thread only."""

    def __init__(
        self, index: HostIndex, shape: ObjectShape, min_tokens: int, pace: FetchPace
    ) -> None:
        self.counts = FetchCounts()
        self.arrivals: dict[str, Arrival] = {}  # Invariant: oldest first
        self._index = index
        self._shape = shape
        self._min_tokens = min_tokens
        self._pace = pace
        self._ticket_count = 0
        self._looks: dict[int, Arrival] = {}
        self._job_of: dict[BlockHash, int] = {}
        self._stuck: dict[BlockHash, int] = {}  # by jobs that were abandoned and hang still
        self._known: dict[str, Request] = {}
        self._failed: set[str] = set()  # Invariant: all of them known
        self._over: dict[str, Look] = {}  # Invariant: all of them known
        self._held_slots = 0

    def arrive(
        self, request: Request, now_s: float, deadline_s: float
    ) -> tuple[int, list[ObjectNames]] | None:
        """Begin to look for a request's prefix: the ticket, and the objects to be asked for.

        ``None`` if there is nothing to ask for, if a fetch for this request has failed before, or
        while a look is overdue: whoever came now would only wait behind it.
        """
        if self._known.get(request.request_id) is not request:
            self._known[request.request_id] = request
            self._failed.discard(request.request_id)
        shape, hashes = self._shape, request.block_hashes
        boundary = last_boundary_tokens(request.num_tokens, shape.group.block_tokens)
        stop = boundary // shape.tokens
        blocks = min(boundary // shape.group.block_tokens, len(hashes))
        written = self._index.written_run(shape.group.index, hashes, 0, blocks)
        first = written // shape.blocks
        objects = objects_of(shape, hashes, first, stop)
        if not objects:
            return None
        arrival = Arrival(request, deadline_s, first, present=first + len(objects))
        if reason := self._reason_not_to_look(request, len(objects), now_s):
            self._over[request.request_id] = self._look(arrival, reason)
            return None
        self._ticket_count += 1
        self._looks[self._ticket_count] = arrival
        self.arrivals[request.request_id] = arrival
        self.counts.looks += 1
        return self._ticket_count, objects

    def found(self, ticket: int, present: Sequence[bool], rank_count: int) -> list[BlockHash]:
        """The store has answered: an object counts if every rank's part of it is there.

        The names of the objects that the store does not have.
        """
        arrival = self._looks.pop(ticket, None)
        if arrival is None or arrival.state is not FetchState.LOOKING:
            return []
        whole = [
            all(present[at : at + rank_count])
            for at in range(0, len(present) - rank_count + 1, rank_count)
        ]
        run = (*whole, False).index(False)
        arrival.present = arrival.first + run
        reason = self._reason_not_to_fetch(run * self._shape.tokens)
        if reason is None:
            arrival.state = FetchState.FOUND
        else:
            self.end(arrival, reason)
        asked = objects_of(
            self._shape,
            arrival.request.block_hashes,
            arrival.first,
            arrival.first + len(whole),
        )
        return [each.name for each, there in zip(asked, whole, strict=False) if not there]

    def wanted(self, arrival: Arrival, most_slots: int) -> list[tuple[ObjectNames, Columns]]:
        """Objects to be fetched for an arrival, each with the blocks that have no slot yet.

        Head first, up to so many slots. What another job is bringing is waited for, not asked for;
        what an abandoned job may still bring is neither, and so is all behind it.
        """
        shape = self._shape
        group = shape.group.index
        wanted: list[tuple[ObjectNames, Columns]] = []
        hashes = arrival.request.block_hashes
        for each in objects_of(shape, hashes, arrival.first, arrival.present):
            if not self._stuck.keys().isdisjoint(each.names):
                break
            columns = Columns(group)
            for at, name in enumerate(each.names):
                if name in self._job_of:
                    arrival.jobs.add(self._job_of[name])
                elif not self._index.holds(group, name):
                    columns.add(0, each.number * shape.blocks + at, name, 0)
            if columns:
                most_slots -= len(columns)
                if most_slots < 0:
                    break
                wanted.append((each, columns))
        return wanted

    def place(
        self, life: int, wanted: Sequence[tuple[ObjectNames, Columns]]
    ) -> list[tuple[StoredObject, Placed]]:
        """Slots for whole objects, head first, as far as there is room."""
        placed_objects: list[tuple[StoredObject, Placed]] = []
        for each, columns in wanted:
            columns.lives = [life] * len(columns)
            placed = self._index.plan(columns)
            if placed is None:
                break
            if len(placed) < len(columns):
                self._index.abandon(placed)
                break
            slot_of = dict(zip(placed.columns.names, placed.slots, strict=True))
            slots = tuple(slot_of.get(name, SCRATCH) for name in each.names)
            stored = StoredObject(columns.group, each.name, each.parent, slots, placed.generation)
            placed_objects.append((stored, placed))
        return placed_objects

    def started(self, arrival: Arrival, number: int, parts: Sequence[Placed]) -> None:
        """A job that brings ``parts`` for an arrival has a number."""
        arrival.jobs.add(number)
        arrival.asked_tokens += len(parts) * self._shape.tokens
        arrival.started_s = self._pace.clock()
        self.counts.started_objects += len(parts)
        for part in parts:
            for name in part.columns.names:
                self._job_of[name] = number

    def ended(self, entry: OpenJob[Fetched]) -> list[BlockHash]:
        """A fetch came back from every rank; the names of objects that did not come.

        What came may be promised, and is pinned for its request while that waits.
        """
        number, arrival = entry.job.number, entry.detail.arrival
        request_id = arrival.request.request_id
        missing: list[BlockHash] = []
        parts = zip(entry.job.objects, entry.detail.parts, entry.done, strict=True)
        for stored, part, done in parts:
            _forget_all(self._job_of, part.columns.names, number)
            _forget_all(self._stuck, part.columns.names, number)
            if not done:
                self._index.abandon(part)
                self.counts.missed_objects += 1
                missing.append(stored.name)
                arrival.reason = MissReason.FAILED
                if self._known.get(request_id) is arrival.request:
                    self._failed.add(request_id)
                continue
            self.counts.fetched_objects += 1
            arrival.came_tokens += self._shape.tokens
            arrived = self._index.acknowledge(part)
            if arrived == len(part) and self.arrivals.get(request_id) is arrival:
                self._index.pin(part.slots)
                arrival.held.extend(part.slots)
                self._held_slots += len(part)
        self._job_over(number, arrival)
        return missing

    def abandoned(self, entry: OpenJob[Fetched]) -> None:
        """Nobody waits for this job any more; its slots stay its own.

        Their names do not: what it should have brought may be computed and captured meanwhile.
        """
        number = entry.job.number
        self.counts.abandoned_jobs += 1
        for part in entry.detail.parts:
            for name in part.columns.names:
                if self._job_of.get(name) == number:
                    del self._job_of[name]
                    self._stuck[name] = number
            self._index.disown(part)
        entry.detail.arrival.reason = MissReason.LATE
        self._job_over(number, entry.detail.arrival)

    def end(self, arrival: Arrival, reason: MissReason | None = None) -> None:
        """Nothing more will come for this request, for this reason."""
        arrival.state = FetchState.OVER
        arrival.reason = arrival.reason or reason
        request_id = arrival.request.request_id
        if not arrival.held and self.arrivals.get(request_id) is arrival:
            del self.arrivals[request_id]
            self._over[request_id] = self._look(arrival, MissReason.BUSY)

    def drop(self, request_id: str, now_s: float) -> Look:
        """The request was admitted or has ended: what was held for it is let go.

        What came of the look for its prefix.
        """
        over = self._over.pop(request_id, NOTHING_FOUND)
        arrival = self.arrivals.pop(request_id, None)
        if arrival is None:
            return over
        self._index.unpin(arrival.held)
        self._held_slots -= len(arrival.held)
        is_late = arrival.state is not FetchState.OVER and now_s >= arrival.deadline_s
        return self._look(arrival, MissReason.LATE if is_late else MissReason.BUSY)

    def forget(self, request: Request) -> None:
        """The request has ended; its id may be another's already."""
        request_id = request.request_id
        if self._known.get(request_id) is request:
            self.drop(request_id, 0.0)
            del self._known[request_id]
            self._failed.discard(request_id)

    def reset(self) -> None:
        """New keys: no look and no plan counts any more. What is held stays until it is let go."""
        self._job_of.clear()
        self._stuck.clear()
        for arrival in list(self.arrivals.values()):
            self.end(arrival, MissReason.ABSENT)

    @property
    def held_slots(self) -> int:
        """Slots held for requests that wait."""
        return self._held_slots

    def _look(self, arrival: Arrival, reason: MissReason) -> Look:
        """What has come of an arrival; ``reason`` unless there is one already."""
        fetched = len(arrival.held) * self._shape.group.block_tokens
        return Look(fetched, arrival.present * self._shape.tokens, arrival.reason or reason)

    def _reason_not_to_look(
        self, request: Request, objects: int, now_s: float
    ) -> MissReason | None:
        if request.request_id in self._failed:
            return MissReason.FAILED
        if self._is_overdue(now_s):
            return MissReason.LATE
        return MissReason.SHORT if objects * self._shape.tokens < self._min_tokens else None

    def _reason_not_to_fetch(self, tokens: int) -> MissReason | None:
        if not tokens:
            return MissReason.ABSENT
        if tokens < self._min_tokens:
            return MissReason.SHORT
        return None if self._pace.should_fetch(tokens) else MissReason.SLOWER

    def _is_overdue(self, now_s: float) -> bool:
        """Whether the oldest look should have been answered by now."""
        return any(look.deadline_s <= now_s for look in islice(self._looks.values(), 1))

    def _job_over(self, number: int, arrival: Arrival) -> None:
        arrival.jobs.discard(number)
        if arrival.asked_tokens and not arrival.jobs:
            # What failed says nothing of how long a fetch takes.
            if arrival.reason is not MissReason.FAILED:
                asked, came = arrival.asked_tokens, arrival.came_tokens
                self._pace.fetched(asked, came, arrival.started_s)
            arrival.asked_tokens = 0
        for arrival in list(self.arrivals.values()):
            arrival.jobs.discard(number)
            if arrival.state is FetchState.FETCHING and not arrival.jobs:
                self.end(arrival)


def _forget_all(job_of: dict[BlockHash, int], names: Sequence[BlockHash], number: int) -> None:
    """Forget these names as far as they are this job's."""
    for name in names:
        if job_of.get(name) == number:
            del job_of[name]


def keys_asked(
    keys: KeyMaker, rank_count: int, group: int, objects: Sequence[ObjectNames]
) -> list[Key]:
    """Every rank's key of every object: all ranks of the first object, then of the next."""
    return [keys.key(group, rank, each.name) for each in objects for rank in range(rank_count)]
