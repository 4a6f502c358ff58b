"""Job threads: the only ones that speak to a store. They touch the arena's memory, and no other.

A thread outlives every exception: it logs it with its traceback, its own name and the request id,
reports the job as not done, and goes on to the next one. A store that says itself that it is unwell
is mentioned once, not with every job. ``None`` in its queue ends the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from moonstep.stores.base import Get, Put, Store, StoreUnwell
from moonstep.wire import Job, JobEnd
from moonstep.worker.spans import ObjectSpans

logger = logging.getLogger(__name__)

JobQueue = queue.Queue[Job | None]


class Mailbox:
    """Hands ended jobs from many threads to the engine's worker thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[JobEnd] = []

    def put(self, end: JobEnd) -> None:
        with self._lock:
            self._ends.append(end)

    def drain(self) -> list[JobEnd]:
        """What was put in since the last call. Never waits."""
        with self._lock:
            ends, self._ends = self._ends, []
        return ends


class Wellbeing:
    """Says once that the store has become unwell, and once that it is well again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_well = True

    def note(self, error: StoreUnwell | None) -> None:
        """A call has come back, with this error or without one."""
        if error is not None and error.is_told:
            return
        with self._lock:
            changed = self._is_well != (error is None)
            self._is_well = error is None
        if changed and error is not None:
            logger.warning("moonstep: the store is unwell, requests go on without it: %s", error)
        elif changed:
            logger.warning("moonstep: the store is well again")


class JobThread(threading.Thread):
    """Takes jobs from a queue, one after the other, and reports the end of each exactly once."""

    def __init__(
        self,
        name: str,
        jobs: JobQueue,
        store: Store,
        spans: ObjectSpans,
        report: Callable[[JobEnd], None],
        wellbeing: Wellbeing,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs = jobs
        self._store = store
        self._spans = spans
        self._report = report
        self._wellbeing = wellbeing

    def run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                self._report(self._outcome(job))
            finally:
                self._jobs.task_done()

    def handle(self, job: Job) -> list[bool]:
        """Do the job; for each of its objects, whether it is there now. May raise anything."""
        raise NotImplementedError

    def _outcome(self, job: Job) -> JobEnd:
        try:
            done = self.handle(job)
            self._wellbeing.note(None)
            return JobEnd(job.number, tuple(done))
        except StoreUnwell as error:
            self._wellbeing.note(error)
            return JobEnd(job.number, ())
        except Exception:
            logger.exception(
                "%s: %s of %d objects for request %s failed",
                self.name,
                job.kind.value,
                len(job.objects),
                job.request_id,
            )
            return JobEnd(job.number, ())


class BaseSendingThread(JobThread):
    """Pushes: slots to store, but for objects that another rank with the same bytes stores."""

    def handle(self, job: Job) -> list[bool]:
        own = self._spans.own(job)
        items = [item for item, is_own in zip(self._spans.of(job), own, strict=True) if is_own]
        answers = self._store.put(items) if items else []
        stored = iter([answer in (Put.STORED, Put.ALREADY_THERE) for answer in answers])
        return [not is_own or next(stored, False) for is_own in own]


class BaseReceivingThread(JobThread):
    """Fetches: store to slots."""

    def handle(self, job: Job) -> list[bool]:
        answers = self._store.get(self._spans.of(job))
        return [answer is Get.HIT for answer in answers]
