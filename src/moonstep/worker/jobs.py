"""A worker's background jobs: their threads, their queues, and what has come back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from moonstep.stores.base import Store, register
from moonstep.stores.measured import MeasuredStore
from moonstep.wire import SCRATCH, Job, JobEnd, JobKind, StoreCalls, threads_of_a_kind
from moonstep.worker.arena import EMPTY, Arena
from moonstep.worker.spans import ObjectSpans
from moonstep.worker.threads import (
    BaseReceivingThread,
    BaseSendingThread,
    JobQueue,
    JobThread,
    Mailbox,
    Wellbeing,
)

logger = logging.getLogger(__name__)


class StoreJobs:
    """Starts jobs and collects their ends. Called on the engine's worker thread alone.

    The store is told of the arena's memory at once. Raises ``StoreUnwell`` when it cannot use it.

    A fetched slot takes its generation here, when its job is collected: until then no restore can
    be planned from it, and none would pass.
    """

    def __init__(
        self, arena: Arena, store: Store, rank: int, block_bytes: Sequence[int], threads: int
    ) -> None:
        self._arena = arena
        self._store = MeasuredStore(store)
        self._mailbox = Mailbox()
        self._open: dict[int, Job] = {}
        self._pushes: JobQueue = queue.Queue()
        self._fetches: JobQueue = queue.Queue()
        spans = ObjectSpans(arena, rank, block_bytes, partial(register, store))
        wellbeing = Wellbeing()
        self._threads: list[JobThread] = [
            kind(
                f"moonstep-{name}-{number}", jobs, self._store, spans, self._mailbox.put, wellbeing
            )
            for kind, name, jobs in (
                (BaseSendingThread, "push", self._pushes),
                (BaseReceivingThread, "fetch", self._fetches),
            )
            for number in range(threads_of_a_kind(threads))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the threads; the slots of a fetch hold nothing from now on."""
        for job in jobs:
            self._open[job.number] = job
            if job.kind is JobKind.PUSH:
                self._pushes.put(job)
                continue
            for each in job.objects:
                self._arena.generation[_own(each.slots)] = EMPTY
            self._fetches.put(job)

    def collect(self) -> tuple[JobEnd, ...]:
        """The jobs that have ended since the last call. Never waits."""
        ends = self._mailbox.drain()
        for end in ends:
            job = self._open.pop(end.number)
            if job.kind is JobKind.FETCH:
                for each, done in zip(job.objects, end.done, strict=False):
                    if done:
                        self._arena.generation[_own(each.slots)] = each.generation
        return tuple(ends)

    def calls(self, verb: str) -> StoreCalls:
        """What the calls of a verb have come to, for a report; their durations are told once."""
        stats = self._store.stats_of(verb)
        return StoreCalls(
            nbytes=stats.nbytes,
            unwell=stats.unwell,
            outcomes=tuple(sorted(stats.outcomes.items())),
            ended_ns=self._store.take_durations_ns(verb),
        )

    def close(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
        """End the threads and the store, waiting at most ``deadline_s``. False: something hangs.

        What hangs is left to its daemon thread, and so is the store's own ``close``: it may block
        as long as the store does.
        """
        stop_s = clock() + deadline_s
        for thread in self._threads:
            jobs = self._pushes if isinstance(thread, BaseSendingThread) else self._fetches
            jobs.put(None)
        closer = threading.Thread(target=self._close_store, name="moonstep-close", daemon=True)
        for thread in self._threads:
            thread.join(max(0.0, stop_s - clock()))
        closer.start()
        closer.join(max(0.0, stop_s - clock()))
        hanging = [t.name for t in (*self._threads, closer) if t.is_alive()]
        if hanging:
            logger.warning("moonstep: left behind at shutdown, still in a call: %s", hanging)
        return not hanging

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception:
            logger.exception("closing the store failed")


def _own(slots: Sequence[int]) -> list[int]:
    """The slots that take bytes."""
    return [slot for slot in slots if slot != SCRATCH]
