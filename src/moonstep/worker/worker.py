"""The worker half: restores before the forward pass, captures after it, reports of both."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from moonstep.stores.base import Store
from moonstep.wire import (
    BLOCK,
    GENERATION,
    GROUP,
    NO_CALLS,
    SLOT,
    Job,
    RankReport,
    ReqMeta,
    Rows,
    StepPlan,
    WorkerReport,
)
from moonstep.worker.arena import EMPTY, Arena
from moonstep.worker.device import ENDED, CpuDevice, DeviceFactory, Ticket
from moonstep.worker.jobs import StoreJobs
from moonstep.worker.pieces import Piece, block_bytes, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

NO_STEP: Final = -1
"""``through`` of a rank that has captured for no step yet."""


class WorkerSettings(Protocol):
    """What the worker half reads of the settings."""

    @property
    def host_cache_bytes(self) -> int:
        """Bytes of host memory per engine, over all its ranks."""
        ...

    @property
    def store_threads(self) -> int: ...

    @property
    def shutdown_deadline_s(self) -> float: ...


class StaleSlot(RuntimeError):
    """A restore names a slot that no longer holds, or never held, what the plan says it holds.

    The promise is out and the engine may have shared the blocks already, so there is no way to go
    on: whoever catches this stops the engine.
    """


@dataclass(slots=True)
class WorkerStats:
    """Totals since the start. Times are those spent in the calls, copies included."""

    captures: int = 0
    captured_blocks: int = 0
    capture_bytes: int = 0
    capture_ns: int = 0
    failed_captures: int = 0
    restores: int = 0
    restored_blocks: int = 0
    restore_bytes: int = 0
    restore_ns: int = 0


class _Outcome(Enum):
    """What became of a step's captures when they were asked for."""

    NOTHING_TO_DO = "nothing to do"
    FAILED = "failed"
    STARTED = "started"


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose captures were asked for and that no report has covered yet."""

    number: int
    outcome: _Outcome
    ticket: Ticket


class MooncakeStoreWorker:
    """One rank's host memory, and the copies to and from it.

    All verbs are called on the engine's worker thread, in the order of its steps. ``rank`` is the
    rank in the engine, ``pieces[g]`` describes a block of group ``g``, ``block_count`` is the
    number of the engine's blocks with the null block. ``device`` builds the device's side;
    ``store`` is what its jobs push to and fetch from, if there is one.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        rank: int,
        world_size: int,
        block_count: int,
        pieces: Sequence[Sequence[Piece]],
        device: DeviceFactory = CpuDevice,
        store: Store | None = None,
    ) -> None:
        self._rank = rank
        self._block_bytes: npt.NDArray[np.int64] = np.array(
            [block_bytes(group) for group in pieces], dtype=np.int64
        )
        bytes_per_slot = slot_bytes(pieces)
        slots = settings.host_cache_bytes // world_size // bytes_per_slot if bytes_per_slot else 0
        self.arena = Arena(slots, bytes_per_slot)
        self._device = device(self.arena, pieces, block_count)
        self._shutdown_deadline_s = settings.shutdown_deadline_s
        self.jobs = store and StoreJobs(
            self.arena, store, rank, self._block_bytes.tolist(), settings.store_threads
        )
        self.stats = WorkerStats()
        self._open: deque[_Step] = deque()
        self._captured: list[int] = []
        self._through = NO_STEP
        self._has_news = True
        self._unstarted: tuple[Job, ...] = ()  # of the step that began last
        self._awaited: int | None = (
            None  # a step whose plan has captures that are not asked for yet
        )

    @property
    def slots(self) -> int:
        """How many slots this rank has; known from the start and told in the first report."""
        return self.arena.slots

    def restore(self, plan: StepPlan) -> None:
        """Copy the plan's slots to their blocks, before the step's forward pass. Once a step.

        Raises ``StaleSlot`` or ``BadRow`` before the first byte: a promise that cannot be kept.
        """
        self._expect_captures(plan)
        rows = plan.restores
        if not len(rows):
            return
        start_ns = time.perf_counter_ns()
        self._check_generations(rows, plan.restores_of)
        self._device.restore(rows)
        self.stats.restores += 1
        self.stats.restored_blocks += len(rows)
        self.stats.restore_bytes += self._bytes_of(rows)
        self.stats.restore_ns += time.perf_counter_ns() - start_ns
        self._has_news = True

    def capture(self, plan: StepPlan) -> None:
        """Copy the plan's blocks to their slots, after the step's forward pass. Raises nothing.

        The slots give up what they held before anything is tried. When the copy fails they stay
        empty, and the step is never reported as captured.
        """
        self._awaited = None
        self._unstarted = ()
        self._start(plan.jobs)
        if not len(plan.captures):
            self._open.append(_Step(plan.step, _Outcome.NOTHING_TO_DO, ENDED))
            return
        start_ns = time.perf_counter_ns()
        try:
            ticket = self._start_capture(plan.captures)
            step = _Step(plan.step, _Outcome.STARTED, ticket)
        except Exception:
            self.stats.failed_captures += 1
            logger.exception("capture of step %d failed", plan.step)
            step = _Step(plan.step, _Outcome.FAILED, ENDED)
        self._open.append(step)
        self.stats.capture_ns += time.perf_counter_ns() - start_ns

    def report(self) -> WorkerReport | None:
        """What came to an end since the last report, or None when nothing did. Never waits.

        Restores count as well, though only the totals tell of them. The first report also tells
        the number of slots. It may be asked for before ``capture`` of the same step: it then tells
        of earlier steps.
        """
        while self._open and self._open[0].ticket.ended():
            step = self._open.popleft()
            self._through = step.number
            self._has_news |= step.outcome is not _Outcome.NOTHING_TO_DO
            if step.outcome is _Outcome.STARTED:
                self._captured.append(step.number)
        ended_jobs = self.jobs.collect() if self.jobs else ()
        if not (self._has_news or ended_jobs):
            return None
        captured, self._captured = tuple(self._captured), []
        self._has_news = False
        return WorkerReport(
            {
                self._rank: RankReport(
                    slots=self.slots,
                    through=self._through,
                    captured=captured,
                    ended_jobs=ended_jobs,
                    capture_bytes=self.stats.capture_bytes,
                    restore_bytes=self.stats.restore_bytes,
                    capture_ns=self.stats.capture_ns,
                    restore_ns=self.stats.restore_ns,
                    puts=self.jobs.calls("put") if self.jobs else NO_CALLS,
                    gets=self.jobs.calls("get") if self.jobs else NO_CALLS,
                )
            }
        )

    def shutdown(self) -> None:
        """End jobs, the device's work and the arena's thread. No verb may be called afterwards.

        Waits at most ``shutdown_deadline_s`` for jobs; the memory of what hangs then stays mapped.
        """
        if self.jobs:
            self.jobs.close(self._shutdown_deadline_s)
        self._device.close()
        self.arena.close()

    def _expect_captures(self, plan: StepPlan) -> None:
        """A step begins. Captures of an earlier one that nobody asked for have failed.

        vLLM 0.32.0 leaves ``wait_for_save`` out on all but the last pipeline rank when it decodes
        speculatively; without a word from here such slots would stay planned for good. Jobs of such
        a step begin now: their slots are their own until they end.
        """
        self._start(self._unstarted)
        self._unstarted = plan.jobs
        if self._awaited is not None:
            self.stats.failed_captures += 1
            logger.error("captures of step %d were never asked for", self._awaited)
            self._open.append(_Step(self._awaited, _Outcome.FAILED, ENDED))
        self._awaited = plan.step if len(plan.captures) else None

    def _start(self, jobs: tuple[Job, ...]) -> None:
        if self.jobs and jobs:
            self.jobs.start(jobs)

    def _start_capture(self, rows: Rows) -> Ticket:
        slots = rows[:, SLOT]
        there = (slots >= 0) & (slots < self.slots)
        self.arena.generation[slots[there]] = EMPTY
        ticket = self._device.capture(rows)
        self.arena.generation[slots] = rows[:, GENERATION]
        self.stats.captures += 1
        self.stats.captured_blocks += len(rows)
        self.stats.capture_bytes += self._bytes_of(rows)
        return ticket

    def _check_generations(self, rows: Rows, restores_of: Sequence[ReqMeta]) -> None:
        """Raise ``StaleSlot`` for the first row whose slot does not hold what the row says."""
        row = first_stale(rows, self.arena.generation)
        if row is None:
            return
        slot, wanted = int(rows[row, SLOT]), int(rows[row, GENERATION])
        request_id = next(
            (of.request_id for of in restores_of if of.start <= row < of.stop), "of no request"
        )
        held = int(self.arena.generation[slot]) if 0 <= slot < self.slots else EMPTY
        raise StaleSlot(
            f"request {request_id}: slot {slot} is to be restored to block "
            f"{int(rows[row, BLOCK])} at generation {wanted}, but it is at {held}"
        )

    def _bytes_of(self, rows: Rows) -> int:
        return int(self._block_bytes[rows[:, GROUP]].sum())


def first_stale(rows: Rows, generation: npt.NDArray[np.int32]) -> int | None:
    """The first row whose slot is not at the row's generation; an empty slot never is.

    >>> rows = np.array([[0, 1, 0, 7], [0, 2, 1, 7], [0, 3, 9, 7]], dtype=np.int32)
    >>> first_stale(rows[:1], np.array([7, 8], dtype=np.int32)) is None
    True
    >>> first_stale(rows, np.array([7, 8], dtype=np.int32))
    1
    >>> first_stale(rows[2:], np.array([7, 7], dtype=np.int32))
    0
    """
    slots, wanted = rows[:, SLOT], rows[:, GENERATION]
    there = (slots >= 0) & (slots < len(generation))
    good = there & (wanted > EMPTY)
    good[there] &= generation[slots[there]] == wanted[there]
    stale = np.flatnonzero(~good)
    return int(stale[0]) if len(stale) else None
