"""Fetches: what the store has for a request that arrives, brought into slots before it is promised.

Looking starts when a request arrives. While its bytes are on their way the answer is *pending*, for
a bounded number of requests and until a deadline counted from the arrival; then the promise is what
has come. One look and one plan a request: what failed is not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple, Protocol

from moonstep.engine import BlockHash, Request
from moonstep.groups import block_names
from moonstep.keys import Key, KeyMaker
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.jobs import OpenJob
from moonstep.scheduler.objects import ObjectPlan, ObjectShape, WantedObject, all_of, objects_of
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


Mark = tuple[int, BlockHash]
"""Group and name of a block."""


@dataclass(slots=True)
class Arrival:
    """A request that has arrived and was not admitted yet."""

    request: Request
    deadline_s: float
    first: list[int]
    """By group of full attention, how many of its objects the host cache has, from the first."""
    state: FetchState = FetchState.LOOKING
    boundaries: list[int] = field(default_factory=list)
    """Up to where host cache and store together have all that a resume reads, highest first."""
    jobs: set[int] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    """Slots that came for it, pinned until it is admitted."""


class Look(NamedTuple):
    """What was asked of the store for an arrival."""

    arrival: Arrival
    asked: list[WantedObject]


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

    def __init__(self, index: HostIndex, objects: ObjectPlan, min_tokens: int) -> None:
        self.counts = FetchCounts()
        self.arrivals: dict[str, Arrival] = {}  # Invariant: oldest first
        self._index = index
        self._objects = objects
        self._min_tokens = min_tokens
        self._ticket_count = 0
        self._looks: dict[int, Look] = {}
        self._job_of: dict[Mark, int] = {}
        self._stuck: dict[Mark, int] = {}  # by jobs that were abandoned and hang still
        self._known: dict[str, Request] = {}
        self._failed: set[str] = set()  # Invariant: all of them known
        self._held_slots = 0

    def arrive(
        self, request: Request, now_s: float, deadline_s: float
    ) -> tuple[int, list[WantedObject]] | None:
        """Begin to look for a request's prefix: the ticket, and the objects to be asked for.

        ``None`` if there is nothing to ask for, if a fetch for this request has failed before, or
        while a look is overdue: whoever came now would only wait behind it.
        """
        if self._known.get(request.request_id) is not request:
            self._known[request.request_id] = request
            self._failed.discard(request.request_id)
        if request.request_id in self._failed or self._is_overdue(now_s):
            return None
        stop_tokens = self._stop_tokens(request)
        arrival = Arrival(request, deadline_s, [])
        asked: list[WantedObject] = []
        for shape in self._objects.dense:
            first = self._objects_here(shape, request, stop_tokens)
            arrival.first.append(first)
            stop = stop_tokens // shape.tokens
            asked += all_of(shape, objects_of(shape, request.block_hashes, first, stop))
        for boundary in range(
            self._objects.unit_tokens, stop_tokens + 1, self._objects.unit_tokens
        ):
            here = self._objects.at(request.block_hashes, boundary)
            asked += [each for each in here if not self._has_all(each)]
        tokens = stop_tokens - self._least_here(arrival)
        if not asked or tokens < self._min_tokens:
            return None
        self._ticket_count += 1
        self._looks[self._ticket_count] = Look(arrival, asked)
        self.arrivals[request.request_id] = arrival
        self.counts.looks += 1
        return self._ticket_count, asked

    def found(
        self, ticket: int, present: Sequence[bool], parts_of: Callable[[int], int]
    ) -> list[Mark]:
        """The store has answered: an object counts if every part of it is there.

        ``parts_of`` says how many keys one object of a group has. The objects that the store does
        not have.
        """
        look = self._looks.pop(ticket, None)
        if look is None or look.arrival.state is not FetchState.LOOKING:
            return []
        arrival, at = look.arrival, 0
        there: set[Mark] = set()
        missing: list[Mark] = []
        for each in look.asked:
            count = parts_of(each.shape.group.index)
            parts = present[at : at + count]
            if len(parts) < count:
                break  # what is not said is not there, and not known to be missing either
            at += count
            if all(parts):
                there.add(each.mark)
            else:
                missing.append(each.mark)
        arrival.boundaries = self._within_reach(arrival, there)
        gain = max(arrival.boundaries, default=0) - self._least_here(arrival)
        if gain > 0 and gain >= self._min_tokens:
            arrival.state = FetchState.FOUND
        else:
            self.end(arrival)
        return missing

    def _stop_tokens(self, request: Request) -> int:
        """The highest boundary that a store's hit can end at. The last token is computed."""
        hashed_tokens = len(request.block_hashes) * self._objects.hash_tokens
        return self._objects.below(min(request.num_tokens - 1, hashed_tokens))

    def _objects_here(self, shape: ObjectShape, request: Request, stop_tokens: int) -> int:
        """How many of a prefix's objects the host cache has, from the first."""
        group = shape.group
        names = block_names(request.block_hashes, group, 0, stop_tokens // group.block_tokens)
        return self._index.written_run(group.index, names, 0, len(names)) // shape.blocks

    def _has_all(self, each: WantedObject) -> bool:
        return self._index.has_written(each.shape.group.index, each.names.names)

    def _least_here(self, arrival: Arrival) -> int:
        """Tokens from which on something has to be fetched."""
        if self._objects.sparse:
            return 0
        rows = zip(self._objects.dense, arrival.first, strict=True)
        return min(shape.tokens * first for shape, first in rows)

    def _within_reach(self, arrival: Arrival, there: set[Mark]) -> list[int]:
        """Boundaries that can be resumed at once what is ``there`` has come, highest first."""
        hashes, unit = arrival.request.block_hashes, self._objects.unit_tokens
        reach = self._stop_tokens(arrival.request)
        for shape, first in zip(self._objects.dense, arrival.first, strict=True):
            objects = all_of(shape, objects_of(shape, hashes, first, reach // shape.tokens))
            run = ([each.mark in there for each in objects] + [False]).index(False)
            reach = min(reach, (first + run) * shape.tokens)
        reach = self._objects.below(reach)
        if not self._objects.sparse:
            return [reach] if reach else []
        return [
            boundary
            for boundary in range(reach, 0, -unit)
            if all(
                each.mark in there or self._has_all(each)
                for each in self._objects.at(hashes, boundary)
            )
        ]

    def wanted(self, arrival: Arrival, most_slots: int) -> list[tuple[WantedObject, Columns]]:
        """Objects to be fetched for an arrival, each with the blocks that have no slot yet.

        Head first, up to so many slots; where there are windows or states, all that one boundary
        needs, or nothing. What another job is bringing is waited for, not asked for; what an
        abandoned job may still bring is neither, and so is all behind it.
        """
        for boundary in arrival.boundaries:
            wanted, jobs, is_whole = self._missing(arrival, boundary, most_slots)
            if is_whole or not self._objects.sparse:
                arrival.jobs |= jobs
                return wanted
        return []

    def _missing(
        self, arrival: Arrival, boundary: int, most_slots: int
    ) -> tuple[list[tuple[WantedObject, Columns]], set[int], bool]:
        """What lacks for a boundary, the jobs that bring some of it, and whether that is all."""
        wanted: list[tuple[WantedObject, Columns]] = []
        jobs: set[int] = set()
        for each in self._up_to(arrival, boundary):
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

    def _up_to(self, arrival: Arrival, boundary: int) -> Iterator[WantedObject]:
        """All objects that a resume at ``boundary`` reads and the host cache had not at first."""
        hashes = arrival.request.block_hashes
        for shape, first in zip(self._objects.dense, arrival.first, strict=True):
            yield from all_of(shape, objects_of(shape, hashes, first, boundary // shape.tokens))
        yield from self._objects.at(hashes, boundary)

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

    def started(self, arrival: Arrival, number: int, parts: Sequence[Placed]) -> None:
        """A job that brings ``parts`` for an arrival has a number."""
        arrival.jobs.add(number)
        self.counts.started_objects += len(parts)
        for part in parts:
            self._job_of.update(dict.fromkeys(_marks(part), number))

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
                if self._known.get(request_id) is arrival.request:
                    self._failed.add(request_id)
                continue
            self.counts.fetched_objects += 1
            arrived = self._index.acknowledge(part)
            if arrived == len(part) and self.arrivals.get(request_id) is arrival:
                self._index.pin(part.slots)
                arrival.held.extend(part.slots)
                self._held_slots += len(part)
        self._job_over(number)
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
        self._job_over(number)

    def end(self, arrival: Arrival) -> None:
        """Nothing more will come for this request."""
        arrival.state = FetchState.OVER
        request_id = arrival.request.request_id
        if not arrival.held and self.arrivals.get(request_id) is arrival:
            del self.arrivals[request_id]

    def drop(self, request_id: str) -> None:
        """The request was admitted or has ended: what was held for it is let go."""
        arrival = self.arrivals.pop(request_id, None)
        if arrival is not None:
            self._index.unpin(arrival.held)
            self._held_slots -= len(arrival.held)

    def forget(self, request: Request) -> None:
        """The request has ended; its id may be another's already."""
        request_id = request.request_id
        if self._known.get(request_id) is request:
            self.drop(request_id)
            del self._known[request_id]
            self._failed.discard(request_id)

    def reset(self) -> None:
        """New keys: no look and no plan counts any more. What is held stays until it is let go."""
        self._job_of.clear()
        self._stuck.clear()
        for arrival in list(self.arrivals.values()):
            self.end(arrival)

    @property
    def held_slots(self) -> int:
        """Slots held for requests that wait."""
        return self._held_slots

    def _is_overdue(self, now_s: float) -> bool:
        """Whether the oldest look should have been answered by now."""
        return any(look.arrival.deadline_s <= now_s for look in islice(self._looks.values(), 1))

    def _job_over(self, number: int) -> None:
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


def keys_asked(keys: KeyMaker, rank_count: int, asked: Sequence[WantedObject]) -> list[Key]:
    """Every rank's key of every object: all ranks of the first object, then of the next."""
    return [
        keys.key(each.shape.group.index, rank, each.names.name)
        for each in asked
        for rank in range(rank_count)
    ]
