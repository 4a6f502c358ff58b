"""Fetches: what the store has for a request that arrives, brought into slots before it is promised.

Looking starts when a request arrives. While its bytes are on their way the answer is *pending*, for
a bounded number of requests and until a deadline counted from the arrival; then the promise is what
has come. One plan a request: what failed is not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from moonstep.engine import Request
from moonstep.groups import block_names, hit_blocks
from moonstep.scheduler.arrivals import (
    Arrival,
    Asked,
    AskedObjects,
    FetchCounts,
    Fetched,
    FetchState,
    Mark,
)
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.jobs import OpenJob
from moonstep.scheduler.misses import NOTHING_FOUND, Look, MissReason
from moonstep.scheduler.objects import ObjectPlan, ObjectShape, Reach, WantedObject
from moonstep.scheduler.pace import FetchPace
from moonstep.scheduler.slots import Placed
from moonstep.scheduler.survey import Survey
from moonstep.wire import SCRATCH, Job, StoredObject

OBJECTS_PER_JOB: Final = 4


class FetchPlanner:
    """Arrivals and what is being brought for them. Scheduler thread only."""

    def __init__(
        self, index: HostIndex, objects: ObjectPlan, min_tokens: int, pace: FetchPace
    ) -> None:
        self.counts = FetchCounts()
        self.arrivals: dict[str, Arrival] = {}  # Invariant: oldest first
        self._index = index
        self._objects = objects
        self._min_tokens = min_tokens
        self._pace = pace
        self._survey = Survey(index, objects)
        self._ticket_count = 0
        self._looks: dict[int, Asked] = {}
        self._job_of: dict[Mark, int] = {}
        self._stuck: dict[Mark, int] = {}  # by jobs that were abandoned and hang still
        self._known: dict[str, Request] = {}
        self._failed: set[str] = set()  # Invariant: all of them known
        self._over: dict[str, Look] = {}  # Invariant: all of them known
        self._held_slots = 0

    def arrive(self, request: Request, now_s: float, deadline_s: float) -> AskedObjects | None:
        """Begin to look for a request's prefix: the ticket, and the objects to be asked for.

        ``None`` if there is nothing to ask for, if a fetch for this request has failed before, or
        while a look is overdue: whoever came now would only wait behind it.
        """
        if self._known.get(request.request_id) is not request:
            self._known[request.request_id] = request
            self._failed.discard(request.request_id)
        arrival = Arrival(request, deadline_s)
        asked = self._survey.begin(arrival)
        arrival.known_tokens = arrival.top.resume_tokens
        if not asked:
            return None
        tokens = arrival.top.resume_tokens - self._survey.least_here(arrival)
        if reason := self._reason_not_to_look(request, tokens, now_s):
            self._over[request.request_id] = self._look(arrival, reason)
            return None
        self.arrivals[request.request_id] = arrival
        return self._ask(arrival, asked)

    def _ask(self, arrival: Arrival, asked: list[WantedObject]) -> AskedObjects:
        self._ticket_count += 1
        self._looks[self._ticket_count] = Asked(arrival, asked)
        self.counts.looks += 1
        return self._ticket_count, asked

    def found(
        self, ticket: int, present: Sequence[bool], parts_of: Callable[[int], int]
    ) -> tuple[list[Mark], AskedObjects | None]:
        """The store has answered: an object counts if every part of it is there.

        ``parts_of`` says how many keys one object of a group has. The objects that the store does
        not have, and what to ask it next for the same arrival, if anything.
        """
        look = self._looks.pop(ticket, None)
        if look is None or look.arrival.state is not FetchState.LOOKING:
            return [], None
        missing = look.take(present, parts_of)
        arrival = look.arrival
        arrival.reaches = self._survey.reaches(arrival)
        if present and self.arrivals.get(arrival.request.request_id) is arrival:
            if further := self._further(arrival):
                return missing, self._ask(arrival, further)
            if arrival.ends:  # the host cache has all that is stored there
                arrival.reaches = self._survey.reaches(arrival)
        arrival.known_tokens = max((reach.resume_tokens for reach in arrival.reaches), default=0)
        gain = arrival.known_tokens - self._survey.least_here(arrival)
        reason = self._reason_not_to_fetch(gain)
        if reason is None:
            arrival.state = FetchState.FOUND
        else:
            self.end(arrival, reason)
        return missing, None

    def _further(self, arrival: Arrival) -> list[WantedObject]:
        """What to ask next: the ends of earlier prefixes, once, if that can be worth a fetch."""
        if arrival.ends or arrival.top in arrival.reaches:
            return []
        ends = self._survey.ends_behind(arrival)
        if not ends or ends[-1] - self._survey.least_here(arrival) < self._min_tokens:
            return []
        arrival.ends, arrival.known_tokens = ends, ends[-1]
        return self._survey.further(arrival)

    def wanted(self, arrival: Arrival, most_slots: int) -> list[tuple[WantedObject, Columns]]:
        """Objects to be fetched for an arrival, each with the blocks that have no slot yet.

        Head first, up to so many slots; where there are windows or states, all that one boundary
        needs, or nothing. What another job is bringing is waited for, not asked for; what an
        abandoned job may still bring is neither, and so is all behind it.
        """
        for reach in arrival.reaches:
            wanted, jobs, is_whole = self._missing(arrival, reach, most_slots)
            if is_whole or not self._objects.sparse:
                arrival.jobs |= jobs
                arrival.goal = reach
                return wanted
        return []

    def _missing(
        self, arrival: Arrival, reach: Reach, most_slots: int
    ) -> tuple[list[tuple[WantedObject, Columns]], set[int], bool]:
        """What lacks for a resume, the jobs that bring some of it, and whether that is all."""
        wanted: list[tuple[WantedObject, Columns]] = []
        jobs: set[int] = set()
        for each in self._survey.up_to(arrival, reach):
            group = each.shape.group.index
            marks = [(group, name) for name in each.names.names]
            if not self._stuck.keys().isdisjoint(marks):
                return wanted, jobs, False
            columns = Columns(group)
            for at, mark in enumerate(marks):
                if mark in self._job_of:
                    jobs.add(self._job_of[mark])
                elif not self._index.holds(*mark):
                    columns.add(0, each.names.first + at, mark[1], 0)
            most_slots -= len(columns)
            if most_slots < 0:
                return wanted, jobs, False
            if columns:
                wanted.append((each, columns))
        return wanted, jobs, True

    def use(self, life: int, arrival: Arrival) -> None:
        """What the host cache has of what an arrival will resume from, ``life`` uses from now on.

        Else it might be what makes room for the rest: it was used long ago, perhaps longest of all.
        """
        objects, goal = self._objects, arrival.goal
        ends = [(shape.group, goal.end_tokens) for shape in objects.dense]
        ends += [(shape.group, goal.resume_tokens) for shape in objects.sparse]
        for group, end_tokens in ends:
            needed = hit_blocks(group, end_tokens)
            names = block_names(arrival.request.block_hashes, group, needed.start, needed.stop)
            self._index.use(life, group.index, names, (), needed[: len(names)])

    def place(
        self, life: int, wanted: Sequence[tuple[WantedObject, Columns]]
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
            names = each.names
            slots = tuple(slot_of.get(name, SCRATCH) for name in names.names)
            stored = StoredObject(columns.group, names.name, names.parent, slots, placed.generation)
            placed_objects.append((stored, placed))
        return placed_objects

    def started(self, arrival: Arrival, job: Job, parts: Sequence[Placed]) -> None:
        """A job brings ``parts`` of its objects, those that have slots, for an arrival."""
        arrival.jobs.add(job.number)
        arrival.asked_tokens += sum(map(self._tokens_of, job.objects))
        arrival.started_s = self._pace.clock()
        self.counts.started_objects += len(parts)
        for part in parts:
            self._job_of.update(dict.fromkeys(_marks(part), job.number))

    def ended(self, entry: OpenJob[Fetched]) -> list[Mark]:
        """A fetch came back from every rank; the objects that did not come.

        What came may be promised, and is pinned for its request while that waits.
        """
        number, arrival = entry.job.number, entry.detail.arrival
        request_id = arrival.request.request_id
        missing: list[Mark] = []
        parts = zip(entry.job.objects, entry.detail.parts, entry.done, strict=True)
        for stored, part, done in parts:
            _forget_all(self._job_of, _marks(part), number)
            _forget_all(self._stuck, _marks(part), number)
            if not done:
                self._index.abandon(part)
                self.counts.missed_objects += 1
                missing.append((stored.group, stored.name))
                arrival.reason = MissReason.FAILED
                if self._known.get(request_id) is arrival.request:
                    self._failed.add(request_id)
                continue
            self.counts.fetched_objects += 1
            arrival.came_tokens += self._tokens_of(stored)
            arrived = self._index.acknowledge(part)
            if arrived == len(part) and self.arrivals.get(request_id) is arrival:
                self._index.pin(part.slots)
                arrival.held.extend(part.slots)
                if part.columns.group == self._lead.group.index:
                    arrival.held_tokens += len(part) * self._lead.group.block_tokens
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
            for mark in _marks(part):
                if self._job_of.get(mark) == number:
                    del self._job_of[mark]
                    self._stuck[mark] = number
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
        return Look(arrival.held_tokens, arrival.known_tokens, arrival.reason or reason)

    @property
    def _lead(self) -> ObjectShape:
        """The objects that tokens are counted by: every prefix is covered by one group's once."""
        return self._objects.shapes[0]

    def _tokens_of(self, stored: StoredObject) -> int:
        group = self._lead.group
        return len(stored.slots) * group.block_tokens if stored.group == group.index else 0

    def _reason_not_to_look(self, request: Request, tokens: int, now_s: float) -> MissReason | None:
        if request.request_id in self._failed:
            return MissReason.FAILED
        if self._is_overdue(now_s):
            return MissReason.LATE
        return MissReason.SHORT if tokens < self._min_tokens else None

    def _reason_not_to_fetch(self, tokens: int) -> MissReason | None:
        if tokens <= 0:
            return MissReason.ABSENT
        if tokens < self._min_tokens:
            return MissReason.SHORT
        return None if self._pace.should_fetch(tokens) else MissReason.SLOWER

    def _is_overdue(self, now_s: float) -> bool:
        """Whether the oldest look should have been answered by now."""
        return any(look.arrival.deadline_s <= now_s for look in islice(self._looks.values(), 1))

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


def _marks(part: Placed) -> list[Mark]:
    return [(part.columns.group, name) for name in part.columns.names]


def _forget_all(job_of: dict[Mark, int], marks: Sequence[Mark], number: int) -> None:
    """Forget these blocks as far as they are this job's."""
    for mark in marks:
        if job_of.get(mark) == number:
            del job_of[mark]
