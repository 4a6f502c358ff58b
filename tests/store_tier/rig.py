"""A store tier driven by hand: a clock that stands still, a look that answers when told to.

Blocks are 16 tokens (``tests.scheduler.stock``), objects two blocks unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from moonstep.config import Settings
from moonstep.engine import BlockHash, Request
from moonstep.groups import Group
from moonstep.keys import Key, KeyMaker
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.policies import LruPolicy
from moonstep.scheduler.slots import Placed
from moonstep.scheduler.tier import StoreTier
from moonstep.wire import Job, JobEnd, JobKind, RankReport
from tests.scheduler.stock import BLOCK_TOKENS, GROUPS


class Clock:
    """Seconds, moved by the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Looks:
    """Looks that were asked for; they are answered when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Sequence[Key]]] = []
        self._answers: list[tuple[int, list[bool]]] = []

    def ask(self, ticket: int, keys: Sequence[Key]) -> None:
        self.asked.append((ticket, keys))

    def answers(self) -> list[tuple[int, list[bool]]]:
        answers, self._answers = self._answers, []
        return answers

    def answer(self, present: Sequence[bool] | bool, at: int = 0) -> None:
        """Answer the look that was asked ``at``-th of those open."""
        ticket, keys = self.asked.pop(at)
        whole = [present] * len(keys) if isinstance(present, bool) else list(present)
        self._answers.append((ticket, whole))


class Keys:
    """Keys that are new after a reset."""

    def __init__(self) -> None:
        self.current = KeyMaker("default", "0")

    def reset(self) -> None:
        self.current = KeyMaker("default", str(int(self.current.fingerprint) + 1))


class Rig:
    """The tier over an index of ``slots`` slots."""

    def __init__(
        self,
        slots: int = 64,
        ranks: int = 1,
        object_blocks: int = 2,
        groups: Sequence[Group] = GROUPS,
        **settings: Any,
    ) -> None:
        self.clock, self.looks, self.keys = Clock(), Looks(), Keys()
        self.index = HostIndex(len(groups), LruPolicy())
        self.settings = Settings(
            **{
                "store": "memory://rig",
                "chunk_tokens": object_blocks * BLOCK_TOKENS,
                "min_fetch_tokens": object_blocks * BLOCK_TOKENS,
                "fetch_share": 1.0,
                "max_busy_share": 1.0,
                "fetch_deadline_s": 2.0,
                "push_deadline_s": 30.0,
                **settings,
            }
        )
        self.ranks = ranks
        self.tier = StoreTier(
            self.settings, groups, ranks, self.index, self.keys, self.looks, self.clock
        )
        self._lives = count(1)
        if slots:
            self.index.resize(slots)

    def plan(self) -> tuple[Job, ...]:
        """One step."""
        jobs = self.tier.plan(lambda: next(self._lives))
        self.check()
        return jobs

    def fetches(self) -> list[Job]:
        return [job for job in self.plan() if job.kind is JobKind.FETCH]

    def pushes(self) -> list[Job]:
        return [job for job in self.plan() if job.kind is JobKind.PUSH]

    def end(
        self, job: Job, done: bool | Sequence[bool] = True, ranks: Iterable[int] | None = None
    ) -> None:
        """Ranks (all, if not given) report the end of a job."""
        answers = (done,) * len(job.objects) if isinstance(done, bool) else tuple(done)
        of = range(self.ranks) if ranks is None else ranks
        self.report({rank: [(job, answers)] for rank in of})

    def report(self, by_rank: Mapping[int, Sequence[tuple[Job, Sequence[bool]]]]) -> None:
        reports = {
            rank: RankReport(
                slots=self.index.slot_count,
                through=0,
                ended_jobs=tuple(JobEnd(job.number, tuple(done)) for job, done in ends),
            )
            for rank, ends in by_rank.items()
        }
        self.tier.report(reports)
        self.check()

    def arrive(self, request: Request) -> None:
        self.tier.arrived(request)

    def find(self, request: Request, present: Sequence[bool] | bool = True) -> list[Job]:
        """A request arrives, the store answers, and a step is planned: its fetches.

        Of earlier prefixes, which are asked for next, the store has none.
        """
        self.arrive(request)
        self.looks.answer(present, -1)
        return self.fetches_without_more()

    def fetches_without_more(self) -> list[Job]:
        """The fetches of a step, once the store has said that no earlier prefix ended further on.

        Of a look that was answered before; others that were asked for stay open.
        """
        others = len(self.looks.asked)
        jobs = self.fetches()
        if len(self.looks.asked) == others:
            return jobs
        self.looks.answer(False, -1)
        return jobs + self.fetches()

    def place(
        self, names: Sequence[BlockHash], life: int = 0, first: int = 0, group: int = 0
    ) -> Placed:
        """Plan captures of these blocks."""
        columns = Columns(group)
        columns.add_run(life or next(self._lives), first, names, [0] * len(names))
        wanted = self.index.unheld(columns)
        assert len(wanted) == len(names), "somebody has them, or is about to"
        placed = self.index.plan(wanted)
        assert placed is not None
        return placed

    def write(self, names: Sequence[BlockHash], first: int = 0, group: int = 0) -> Placed:
        """These blocks are in the host cache."""
        placed = self.place(names, first=first, group=group)
        assert self.index.acknowledge(placed) == len(names)
        return placed

    def written(self, request: Request) -> int:
        """How many blocks of the request's prefix could be promised."""
        hashes = request.block_hashes
        return self.index.written_run(0, hashes, 0, len(hashes))

    def check(self) -> None:
        """The books add up, and nothing is pinned or planned that nobody owns."""
        self.index.check()
        assert self.tier.fetches.held_slots == sum(
            len(arrival.held) for arrival in self.tier.fetches.arrivals.values()
        )
        if self.tier.is_idle:
            assert not self.index.pinned_count
            assert not self.tier.quarantined_slots
