"""What the halves say to each other: a plan a step, and each rank's report of what became of it.

Everything here is plain data that pickles small: the engine pickles a plan once and every worker
unpickles it. Rows are numpy arrays, so that a plan for a million tokens is one buffer and not a
million objects. A plan is never changed after it was made: the in-process executor hands the
worker the very object the scheduler half built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from moonstep.keys import KeyMaker

Rows = npt.NDArray[np.int32]
"""Copies between KV blocks and slots, one a row: see the column names below."""

GROUP: Final = 0
BLOCK: Final = 1
SLOT: Final = 2
GENERATION: Final = 3
ROW_COLUMNS: Final = 4


NO_ROWS: Final[Rows] = np.empty((0, ROW_COLUMNS), dtype=np.int32)


def make_rows(
    group: int,
    blocks: npt.ArrayLike,
    slots: npt.ArrayLike,
    generations: npt.ArrayLike,
) -> Rows:
    """An ``(n, 4)`` int32 array, a row for each block; one generation may stand for all."""
    blocks = np.asarray(blocks, dtype=np.int32)
    rows = np.empty((len(blocks), ROW_COLUMNS), dtype=np.int32)
    rows[:, GROUP] = group
    rows[:, BLOCK] = blocks
    rows[:, SLOT] = slots
    rows[:, GENERATION] = generations
    return rows


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order."""
    if not parts:
        return NO_ROWS
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class ReqMeta:
    """What a plan says of one request: its restores are the rows ``[start, stop)``."""

    request_id: str
    start: int
    stop: int


SCRATCH: Final = -1
"""In an object's slots: a block the host cache has already, whose bytes go nowhere."""


class JobKind(Enum):
    """What a background job does with its objects."""

    PUSH = "push"
    """Slots to store."""
    FETCH = "fetch"
    """Store to slots."""


class StoredObject(NamedTuple):
    """A run of blocks of one group, as the store keeps it: one slot a block, in order.

    ``name`` is the block hash at its end, ``parent`` that of the object before it in the prefix.
    When it is fetched, its slots take ``generation`` once all of it has arrived and is checked.
    """

    group: int
    name: bytes
    parent: bytes | None
    slots: tuple[int, ...]
    generation: int = 0


class Job(NamedTuple):
    """Objects to be moved between slots and store by a thread of every rank.

    The slots belong to the job until every rank has reported its end.
    """

    number: int
    kind: JobKind
    request_id: str
    keys: KeyMaker
    objects: tuple[StoredObject, ...]


class JobEnd(NamedTuple):
    """The end of a job on one rank: for each object, whether it is there now, whole."""

    number: int
    done: tuple[bool, ...]


class StoreCalls(NamedTuple):
    """Calls of one verb into a rank's store.

    Totals since the start, but for ``ended_ns``: how long the calls took that ended since the
    rank's last report. ``outcomes`` counts objects, by the names of the store's answers.
    """

    nbytes: int = 0
    unwell: int = 0
    """Calls that failed because the store itself was in trouble."""
    outcomes: tuple[tuple[str, int], ...] = ()
    ended_ns: tuple[int, ...] = ()

    def merged(self, later: StoreCalls) -> StoreCalls:
        """These calls and those of a later report of the same rank as one."""
        return later._replace(ended_ns=self.ended_ns + later.ended_ns)


NO_CALLS: Final = StoreCalls()


def threads_of_a_kind(store_threads: int) -> int:
    """How many of a worker's threads push, and how many fetch."""
    return max(1, store_threads // 2)


class StepPlan(NamedTuple):
    """What every worker does in one step. Built by the scheduler half in ``build_connector_meta``.

    ``restores`` are carried out before the forward pass: a worker compares the generation of each
    slot with the row's *before the first byte* and stops the engine when one differs. ``captures``
    run after the forward pass and give their slots the row's generation. A slot may appear in both:
    the restore reads what was there before the capture.
    """

    step: int
    restores: Rows = NO_ROWS
    captures: Rows = NO_ROWS
    restores_of: tuple[ReqMeta, ...] = ()
    received: tuple[str, ...] = ()
    """Requests whose asynchronous load ends with this step's restores."""
    jobs: tuple[Job, ...] = ()
    """Begun after the step's captures, and reported whenever they end."""

    @property
    def is_empty(self) -> bool:
        return not (len(self.restores) or len(self.captures) or self.received or self.jobs)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says after a step.

    ``captured`` lists what *arrived*: steps whose captures were carried out whole. A step at or
    below ``through`` that no report of this rank lists has failed there, whatever the reason.
    The counters are totals since the start.
    """

    slots: int
    through: int
    captured: tuple[int, ...] = ()
    ended_jobs: tuple[JobEnd, ...] = ()
    capture_bytes: int = 0
    restore_bytes: int = 0
    capture_ns: int = 0
    restore_ns: int = 0
    puts: StoreCalls = NO_CALLS
    gets: StoreCalls = NO_CALLS

    def merged(self, later: RankReport) -> RankReport:
        """This report and a later one of the same rank as one."""
        return RankReport(
            slots=later.slots,
            through=max(self.through, later.through),
            captured=self.captured + later.captured,
            ended_jobs=self.ended_jobs + later.ended_jobs,
            capture_bytes=later.capture_bytes,
            restore_bytes=later.restore_bytes,
            capture_ns=later.capture_ns,
            restore_ns=later.restore_ns,
            puts=self.puts.merged(later.puts),
            gets=self.gets.merged(later.gets),
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The reports of one or more ranks for one step, by rank in the engine."""

    by_rank: dict[int, RankReport]

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both reports as one: what the engine does with the reports of all workers of a step."""
        by_rank = dict(self.by_rank)
        for rank, report in other.by_rank.items():
            known = by_rank.get(rank)
            by_rank[rank] = report if known is None else known.merged(report)
        return WorkerReport(by_rank)
