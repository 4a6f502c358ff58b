"""The store tier as the scheduler half sees it: pushes and fetches, and who waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from moonstep.config import Settings
from moonstep.engine import Request, SchedulerOutput
from moonstep.groups import Group
from moonstep.keys import KeyMaker
from moonstep.scheduler.arrivals import (
    Arrival,
    AskedObjects,
    Fetched,
    FetchState,
    Mark,
    StoreLookup,
    keys_asked,
)
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.fetches import OBJECTS_PER_JOB, FetchPlanner
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.jobs import JobLedger
from moonstep.scheduler.misses import Look, MissReason
from moonstep.scheduler.objects import ObjectPlan
from moonstep.scheduler.offers import Offers
from moonstep.scheduler.pace import FetchPace, PrefillPace
from moonstep.scheduler.pushes import Bucket, PushQueue, Stocktaking
from moonstep.scheduler.slots import Placed
from moonstep.wire import Job, JobKind, RankReport, StoredObject, threads_of_a_kind


class Keyring(Protocol):
    """The keys of the weights that are served now."""

    @property
    def current(self) -> KeyMaker: ...

    def reset(self) -> None:
        """The caches were reset: what comes now has keys of its own."""


class Tier(Protocol):
    """What the scheduler half tells and asks a tier behind the host cache."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def owned_slots(self) -> int:
        """Slots that are planned for fetches under way."""

    def arrived(self, request: Request) -> None: ...

    def is_pending(self, request: Request) -> bool: ...

    def admitted(self, request_id: str) -> Look: ...

    def finished(self, request: Request) -> None: ...

    def captured(self, columns: Columns, requests: Mapping[int, Request]) -> None: ...

    def kept(self, request: Request, boundary_tokens: int) -> None: ...

    def went_on(self, request: Request, num_computed_tokens: int) -> None: ...

    def saw(self, output: SchedulerOutput) -> None: ...

    def plan(self, new_life: Callable[[], int]) -> tuple[Job, ...]: ...

    def report(self, by_rank: Mapping[int, RankReport]) -> None: ...

    def reset(self) -> None: ...

    def has_push_work(self) -> bool: ...


TierMaker = Callable[[HostIndex], Tier]
"""Makes the tier behind an index."""


class StoreTier:
    """Pushes what is captured, fetches what arriving requests need. Scheduler thread only."""

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Group],
        rank_count: int,
        index: HostIndex,
        keyring: Keyring,
        lookup: StoreLookup,
        clock: Callable[[], float] = time.monotonic,
        prefill: PrefillPace | None = None,
    ) -> None:
        self._settings = settings
        self._objects = ObjectPlan.of(groups, settings.chunk_tokens)
        self._block_bytes = {group.index: group.block_bytes for group in groups}
        self._rank_count = rank_count
        self._index = index
        self._keyring = keyring
        self._lookup = lookup
        self._clock = clock
        self.pushes = PushQueue(index)
        self._offers = Offers(settings, self._objects, index, self.pushes)
        self._pace = FetchPace(clock, prefill)
        self.fetches = FetchPlanner(index, self._objects, settings.min_fetch_tokens, self._pace)
        self._push_jobs: JobLedger[Stocktaking] = JobLedger(rank_count)
        self._fetch_jobs: JobLedger[Fetched] = JobLedger(rank_count)
        self._bucket = Bucket(settings.push_bytes_per_s, clock())
        self._pending: set[str] = set()
        self._job_count = 0

    @property
    def is_idle(self) -> bool:
        return not (self._push_jobs or self._fetch_jobs or self.pushes or self.fetches.arrivals)

    @property
    def owned_slots(self) -> int:
        return self._fetch_jobs.busy_slots

    @property
    def quarantined_slots(self) -> int:
        """Slots of abandoned jobs, which nobody may touch until their calls have come back."""
        return self._push_jobs.quarantined_slots + self._fetch_jobs.quarantined_slots

    # Requests.

    def arrived(self, request: Request) -> None:
        """A request arrives, or comes back after a preemption: begin to look for its prefix."""
        self.admitted(request.request_id)
        if not self._settings.fetches:
            return
        self._take_answers()
        now_s = self._clock()
        self._ask(self.fetches.arrive(request, now_s, now_s + self._settings.fetch_deadline_s))

    def is_pending(self, request: Request) -> bool:
        """Whether the request should wait: its bytes are on their way, and in time."""
        self._take_answers()
        request_id, now_s = request.request_id, self._clock()
        self._pending = {other for other in self._pending if self._is_awaited(other, now_s)}
        waits = self._is_awaited(request_id, now_s) and (
            request_id in self._pending or len(self._pending) < self._settings.max_pending
        )
        if waits:
            self._pending.add(request_id)
            self.fetches.counts.pending_answers += 1
        return waits

    def _is_awaited(self, request_id: str, now_s: float) -> bool:
        arrival = self.fetches.arrivals.get(request_id)
        return (
            arrival is not None
            and arrival.state is not FetchState.OVER
            and now_s < arrival.deadline_s
        )

    def admitted(self, request_id: str) -> Look:
        """The request waits no more: what was held for it has been promised, or is not wanted.

        What came of the look for its prefix.
        """
        self._pending.discard(request_id)
        return self.fetches.drop(request_id, self._clock())

    def finished(self, request: Request) -> None:
        """The request has ended, and its id may come again as another's."""
        self._offers.finished(request)
        self.fetches.forget(request)
        if request.request_id not in self.fetches.arrivals:
            self._pending.discard(request.request_id)

    # What there is to push.

    def captured(self, columns: Columns, requests: Mapping[int, Request]) -> None:
        """Blocks were captured on every rank, for these lives' requests."""
        self._offers.captured(columns, requests)

    def kept(self, request: Request, boundary_tokens: int) -> None:
        """Windows and states are kept at this boundary."""
        self._offers.kept(request, boundary_tokens)

    def went_on(self, request: Request, num_computed_tokens: int) -> None:
        """A request goes on from a prefix that was there."""
        self._offers.went_on(request, num_computed_tokens)

    def has_push_work(self) -> bool:
        """Whether the engine should go on stepping although no request needs it."""
        if self._push_jobs.awaited or self._fetch_jobs.awaited or self._offers.has_ready():
            return True
        return bool(self.pushes) and self._pushable() > 0

    # One step.

    def saw(self, output: SchedulerOutput) -> None:
        """A step is being built: when, and what it computes."""
        self._pace.prefill.saw(output, self._clock())

    def plan(self, new_life: Callable[[], int]) -> tuple[Job, ...]:
        """The jobs that this step starts."""
        now_s = self._clock()
        for late in self._fetch_jobs.abandon_late(now_s):
            self.fetches.abandoned(late)
        self.pushes.counts.abandoned_jobs += len(self._push_jobs.abandon_late(now_s))
        self._take_answers()
        self._offers.look_again()
        jobs = self._plan_fetches(now_s, new_life)
        if self.pushes:
            jobs += self._plan_pushes(now_s)
        return tuple(jobs)

    def report(self, by_rank: Mapping[int, RankReport]) -> None:
        """Take in the ends of jobs."""
        for entry in self._push_jobs.settle(by_rank):
            self.pushes.ended(entry)
        for fetched in self._fetch_jobs.settle(by_rank):
            missing = set(self.fetches.ended(fetched))
            if fetched.job.keys == self._keyring.current:
                self._learn(fetched.job, missing)

    def _learn(self, fetch: Job, missing: set[Mark]) -> None:
        """What a fetch brought is in the store, and need not go there; what it missed is not."""
        known = self.pushes.stock.known
        for stored in fetch.objects:
            if (stored.group, stored.name) in missing:
                known.discard(stored.group, stored.name)
            else:
                known.add(stored.group, stored.name)

    def reset(self) -> None:
        """The caches were reset: new keys, and nothing from before is waited for."""
        self._keyring.reset()
        self.pushes.reset()
        self.fetches.reset()
        self._offers.reset()

    def _take_answers(self) -> None:
        for ticket, present in self._lookup.answers():
            missing, further = self.fetches.found(ticket, present, self._parts_of)
            for group, name in missing:
                self.pushes.stock.known.discard(group, name)
            self._ask(further)

    def _ask(self, asked: AskedObjects | None) -> None:
        if asked is not None:
            ticket, objects = asked
            self._lookup.ask(ticket, keys_asked(self._keyring.current, self._rank_count, objects))

    def _parts_of(self, group: int) -> int:
        """Keys that together are one object of a group: ranks with the same bytes share one."""
        return len(self._keyring.current.parts(group, self._rank_count))

    def _bytes_of(self, stored: StoredObject) -> int:
        """What an object takes in the store."""
        blocks_bytes = len(stored.slots) * self._block_bytes[stored.group]
        return blocks_bytes * self._parts_of(stored.group)

    @property
    def _most_busy_slots(self) -> int:
        return int(self._settings.max_busy_share * self._index.slot_count)

    def _room(self) -> int:
        """Slots that further jobs may own."""
        return self._most_busy_slots - self._push_jobs.busy_slots - self._fetch_jobs.busy_slots

    def _all_hang(self, jobs: JobLedger[Any]) -> bool:
        """Whether there are as many abandoned jobs as threads: a new one would wait behind them."""
        return jobs.abandoned >= threads_of_a_kind(self._settings.store_threads)

    def _pushable(self) -> int:
        """Objects for whose pushes there are slots and threads."""
        return 0 if self._all_hang(self._push_jobs) else self._room() // self._objects.most_blocks

    def _plan_fetches(self, now_s: float, new_life: Callable[[], int]) -> list[Job]:
        jobs: list[Job] = []
        if not self._index.slot_count:
            return jobs  # no rank has told yet how many there are
        share = int(self._settings.fetch_share * self._index.slot_count)
        for arrival in list(self.fetches.arrivals.values()):
            if arrival.state is not FetchState.FOUND:
                continue
            fits = self._objects.most_blocks <= min(share, self._most_busy_slots)
            if not fits or self._all_hang(self._fetch_jobs):
                self.fetches.end(arrival, MissReason.BUSY)  # waiting would bring nothing
                continue
            left = share - self.fetches.held_slots - self._fetch_jobs.busy_slots
            room = min(left, self._room())
            if room < self._objects.most_blocks:
                break  # oldest first: whoever comes later waits behind
            wanted = self.fetches.wanted(arrival, room)
            life = new_life()
            self.fetches.use(life, arrival)
            placed = self.fetches.place(life, wanted)
            arrival.state = FetchState.FETCHING
            jobs += [
                self._fetch_job(arrival, placed[start : start + OBJECTS_PER_JOB], now_s)
                for start in range(0, len(placed), OBJECTS_PER_JOB)
            ]
            if not arrival.jobs:
                self.fetches.end(arrival, MissReason.BUSY)
        return jobs

    def _fetch_job(
        self, arrival: Arrival, placed: Sequence[tuple[StoredObject, Placed]], now_s: float
    ) -> Job:
        parts = [part for _, part in placed]
        objects = tuple(stored for stored, _ in placed)
        job = self._job(JobKind.FETCH, arrival.request.request_id, objects)
        slot_count = sum(len(part) for part in parts)
        deadline_s = max(arrival.deadline_s, now_s)
        self._fetch_jobs.open(job, Fetched(arrival, parts), slot_count, deadline_s)
        self.fetches.started(arrival, job, parts)
        return job

    def _plan_pushes(self, now_s: float) -> list[Job]:
        jobs: list[Job] = []
        shapes = self._objects.shapes
        most_bytes = max(shape.nbytes * self._parts_of(shape.group.index) for shape in shapes)
        most = self._bucket.objects(most_bytes, now_s, self._pushable())
        for request_id, objects in self.pushes.take(most):
            job = self._job(JobKind.PUSH, request_id, tuple(objects))
            slot_count = sum(len(each.slots) for each in objects)
            deadline_s = now_s + self._settings.push_deadline_s
            self._push_jobs.open(job, self.pushes.stock, slot_count, deadline_s)
            self._bucket.spend(sum(map(self._bytes_of, objects)))
            jobs.append(job)
        return jobs

    def _job(self, kind: JobKind, request_id: str, objects: tuple[StoredObject, ...]) -> Job:
        self._job_count += 1
        keys = self._keyring.current
        return Job(self._job_count, kind, request_id, keys, objects)
