"""Background jobs: who owns which slots until every rank has said that its call came back.

A deadline ends the waiting, never the ownership. A job past it is *abandoned*: nobody waits for it,
and its slots are quarantined until the last rank reports its end, whenever that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from moonstep.wire import Job, RankReport

Detail = TypeVar("Detail")


@dataclass(slots=True)
class OpenJob(Generic[Detail]):
    """A job that some rank has not ended. ``detail`` belongs to whoever opened it."""

    job: Job
    detail: Detail
    slot_count: int
    deadline_s: float
    waiting_for: set[int]
    done: list[bool]
    abandoned: bool = False


class JobLedger(Generic[Detail]):
    """The open jobs of one kind, by number. Scheduler thread only; numbers never repeat."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._open: dict[int, OpenJob[Detail]] = {}  # Invariant: oldest first

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy_slots(self) -> int:
        """Slots that open jobs own, the quarantined ones among them."""
        return sum(entry.slot_count for entry in self._open.values())

    @property
    def quarantined_slots(self) -> int:
        """Slots that abandoned jobs own."""
        return sum(entry.slot_count for entry in self._open.values() if entry.abandoned)

    @property
    def awaited(self) -> int:
        """Jobs that somebody still waits for."""
        return sum(not entry.abandoned for entry in self._open.values())

    @property
    def abandoned(self) -> int:
        """Jobs whose calls hang, or wait behind others that do."""
        return len(self._open) - self.awaited

    def open(self, job: Job, detail: Detail, slot_count: int, deadline_s: float) -> None:
        """Note a job that the plan of this step starts on every rank."""
        ranks, done = set(range(self._rank_count)), [True] * len(job.objects)
        self._open[job.number] = OpenJob(job, detail, slot_count, deadline_s, ranks, done)

    def settle(self, by_rank: Mapping[int, RankReport]) -> list[OpenJob[Detail]]:
        """Take in reports; the jobs that have now ended on every rank."""
        ended: list[OpenJob[Detail]] = []
        for rank, report in by_rank.items():
            for end in report.ended_jobs:
                entry = self._open.get(end.number)
                if entry is None or rank not in entry.waiting_for:
                    continue
                entry.waiting_for.discard(rank)
                arrived = [*end.done, *[False] * len(entry.done)]  # what is not said did not come
                entry.done = [a and b for a, b in zip(entry.done, arrived, strict=False)]
                if not entry.waiting_for:
                    ended.append(self._open.pop(end.number))
        return ended

    def abandon_late(self, now_s: float) -> list[OpenJob[Detail]]:
        """The jobs whose deadline passed since the last call."""
        late = [e for e in self._open.values() if not e.abandoned and now_s >= e.deadline_s]
        for entry in late:
            entry.abandoned = True
        return late
