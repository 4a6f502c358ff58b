"""Background jobs of a worker: every one ends once, threads outlive everything, nobody waits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from moonstep.config import Settings
from moonstep.keys import Key, KeyMaker
from moonstep.stores.base import Get, Put, Transfer
from moonstep.stores.checked import CheckedStore
from moonstep.stores.faulty import Fault, FaultyStore
from moonstep.stores.memory import MemoryStore
from moonstep.wire import SCRATCH, Job, JobEnd, JobKind, StepPlan, StoredObject
from moonstep.worker.arena import EMPTY, Arena
from moonstep.worker.jobs import StoreJobs
from moonstep.worker.pieces import slot_bytes
from moonstep.worker.spans import ObjectSpans
from moonstep.worker.threads import BaseReceivingThread, BaseSendingThread, Wellbeing
from moonstep.worker.worker import MooncakeStoreWorker, StaleSlot
from tests.worker.conftest import BLOCKS, SLOTS, KvMemory, as_rows, kv_memory

SLOT_BYTES = 256
KEYS = KeyMaker("default", "0")
SOON_S = 20.0


def stored(name: str, *slots: int, generation: int = 0, parent: str | None = None) -> StoredObject:
    return StoredObject(0, name.encode(), parent.encode() if parent else None, slots, generation)


def push(number: int, *objects: StoredObject) -> Job:
    return Job(number, JobKind.PUSH, f"request-{number}", KEYS, objects)


def fetch(number: int, *objects: StoredObject) -> Job:
    return Job(number, JobKind.FETCH, f"request-{number}", KEYS, objects)


def key(name: str, rank: int = 0) -> Key:
    return KEYS.key(0, rank, name.encode())


class Desk:
    """Store jobs over an arena of random bytes and a store that fails on command."""

    def __init__(self, threads: int = 2, rank: int = 0) -> None:
        self.arena = Arena(8, SLOT_BYTES)
        self.arena.memory[:] = np.random.default_rng(0).integers(0, 256, 8 * SLOT_BYTES)
        self.memory = MemoryStore()
        self.faulty = FaultyStore(self.memory)
        self.jobs = StoreJobs(
            self.arena, CheckedStore(self.faulty), rank, [SLOT_BYTES - 6], threads
        )

    def bytes_of(self, slot: int) -> bytes:
        return self.arena.slot(slot)[: SLOT_BYTES - 6].tobytes()

    def ends(self, count: int = 1) -> list[JobEnd]:
        """The next ends, as a worker collects them."""
        ends: list[JobEnd] = []
        stop_s = time.monotonic() + SOON_S
        while len(ends) < count:
            assert time.monotonic() < stop_s, f"{len(ends)} of {count} jobs have ended"
            ends += self.jobs.collect()
            threading.Event().wait(0.001)
        return ends

    def run(self, job: Job) -> tuple[bool, ...]:
        self.jobs.start([job])
        (end,) = self.ends()
        assert end.number == job.number
        return end.done


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.faulty.fault = Fault.NONE
    desk.faulty.resume()
    assert desk.jobs.close(SOON_S)


def test_what_is_pushed_is_fetched_again(desk: Desk) -> None:
    first, second = desk.bytes_of(3), desk.bytes_of(5)
    assert desk.run(push(1, stored("a", 3, 5))) == (True,)
    assert desk.memory.contains([key("a")]) == [True]
    assert desk.run(fetch(2, stored("a", 0, 7, generation=4))) == (True,)
    assert (desk.bytes_of(0), desk.bytes_of(7)) == (first, second)
    assert [int(desk.arena.generation[slot]) for slot in (0, 7)] == [4, 4]


def test_calls_are_counted_and_their_durations_told_once(desk: Desk) -> None:
    desk.run(push(1, stored("a", 3, 5), stored("b", 4, 6)))
    desk.run(push(2, stored("a", 3, 5)))
    object_bytes = 2 * (SLOT_BYTES - 6)
    puts = desk.jobs.calls("put")
    assert puts.outcomes == (("already there", 1), ("stored", 2))
    assert puts.nbytes == 2 * object_bytes
    assert len(puts.ended_ns) == 2
    assert all(ns > 0 for ns in puts.ended_ns)
    again = desk.jobs.calls("put")
    assert again == puts._replace(ended_ns=())
    desk.faulty.fault = Fault.FLIPPING
    assert desk.run(fetch(3, stored("a", 0, 7, generation=4))) == (False,)
    desk.faulty.fault = Fault.UNWELL
    assert desk.run(fetch(4, stored("b", 0, 7, generation=5))) == ()
    gets = desk.jobs.calls("get")
    assert (gets.nbytes, gets.unwell, gets.outcomes) == (0, 1, (("damaged", 1),))


def test_ranks_with_the_same_bytes_store_an_object_once_and_both_fetch_it() -> None:
    shared = KeyMaker("default", "0", (2,))
    desks = [Desk(rank=rank) for rank in (0, 1)]
    for desk in desks[1:]:  # one store, and the same bytes
        desk.jobs.close(SOON_S)
        desk.arena.memory[:] = desks[0].arena.memory
        desk.memory = desks[0].memory
        checked = CheckedStore(desk.memory)
        desk.jobs = StoreJobs(desk.arena, checked, 1, [SLOT_BYTES - 6], 2)
    names = [stored(name, slot) for slot, name in enumerate("abcd")]
    job = Job(1, JobKind.PUSH, "r", shared, tuple(names))
    written: list[set[str]] = []
    for desk in desks:
        before = {entry.key for entry in desk.memory.entries()}
        assert desk.run(job) == (True,) * 4
        written.append({entry.key for entry in desk.memory.entries()} - before)
    assert [len(keys) for keys in written] == [2, 2], "they take turns"
    wanted = [stored(name, 4 + slot, generation=9) for slot, name in enumerate("abcd")]
    for desk in desks:
        assert desk.run(Job(2, JobKind.FETCH, "r", shared, tuple(wanted))) == (True,) * 4
        assert [desk.bytes_of(slot) for slot in range(4)] == [
            desk.bytes_of(slot) for slot in range(4, 8)
        ]
    for desk in desks:
        assert desk.jobs.close(SOON_S)


def test_a_block_that_is_here_already_is_read_past_the_arena(desk: Desk) -> None:
    second = desk.bytes_of(5)
    desk.run(push(1, stored("a", 3, 5), stored("b", 4, 6)))
    before = desk.arena.memory.copy()
    objects = stored("a", SCRATCH, 0, generation=2), stored("b", SCRATCH, SCRATCH, generation=3)
    assert desk.run(fetch(2, *objects)) == (True, True)
    assert desk.bytes_of(0) == second
    before[: SLOT_BYTES - 6] = desk.arena.memory[: SLOT_BYTES - 6]
    assert np.array_equal(desk.arena.memory, before), "no slot but its own may change"
    assert desk.arena.generation.tolist() == [2] + [EMPTY] * 7


def test_each_rank_has_keys_of_its_own() -> None:
    desk = Desk(rank=3)
    assert desk.run(push(1, stored("b", 1, parent="a"))) == (True,)
    assert desk.memory.contains([key("b", 3), key("b")]) == [True, False]
    desk.jobs.close(SOON_S)


def test_spans_name_the_object_before() -> None:
    spans = ObjectSpans(Arena(4, SLOT_BYTES), 1, [SLOT_BYTES])
    first, second = spans.of(push(1, stored("a", 0), stored("b", 1, 2, parent="a")))
    assert (first.parent, second.parent) == (None, key("a", 1))
    assert [transfer.nbytes for transfer in (first, second)] == [SLOT_BYTES, 2 * SLOT_BYTES]


def test_a_fetched_slot_takes_its_generation_when_it_is_collected_and_not_before() -> None:
    desk = Desk()
    desk.run(push(1, stored("a", 3)))
    desk.arena.generation[0] = 9
    desk.faulty.fault = Fault.HANGING
    desk.jobs.start([fetch(2, stored("a", 0, generation=4), stored("missing", 1, generation=4))])
    assert desk.arena.generation[0] == EMPTY, "what it held is given up before a byte can come"
    assert desk.faulty.wait_until_hanging(1, SOON_S)
    desk.faulty.fault = Fault.NONE
    desk.faulty.resume()
    assert desk.jobs.close(SOON_S)  # the call has come back
    assert desk.arena.generation[0] == EMPTY
    (end,) = desk.jobs.collect()
    assert end.done == (True, False)
    assert desk.arena.generation[:2].tolist() == [4, EMPTY]


@pytest.mark.parametrize("fault", sorted(set(Fault) - {Fault.HANGING}, key=lambda f: f.name))
def test_under_every_fault_each_job_ends_once_and_the_next_ones_go_on(
    desk: Desk, fault: Fault
) -> None:
    desk.run(push(1, stored("a", 3), stored("b", 4)))
    desk.faulty.fault = fault
    assert len(desk.run(push(2, stored("c", 5)))) in (0, 1)
    desk.jobs.start([fetch(3, stored("a", 0, generation=2), stored("b", 1, generation=2)), push(4)])
    ends = {end.number: end.done for end in desk.ends(2)}
    for slot, name_slot, done in zip((0, 1), (3, 4), [*ends[3], False, False], strict=False):
        assert desk.arena.generation[slot] == (2 if done else EMPTY)
        if done:
            assert desk.bytes_of(slot) == desk.bytes_of(name_slot)
    desk.faulty.fault = Fault.NONE
    assert desk.run(push(5, stored("d", 6))) == (True,)
    assert desk.run(fetch(6, stored("d", 7, generation=3))) == (True,)
    assert desk.jobs.collect() == ()
    assert all(thread.is_alive() for thread in desk.jobs._threads)


def test_an_exception_is_logged_with_the_thread_the_request_and_the_traceback(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.faulty.fault = Fault.BROKEN
    with caplog.at_level(logging.ERROR, logger="moonstep"):
        assert desk.run(push(7, stored("a", 3))) == ()
        assert desk.run(fetch(8, stored("a", 4), stored("b", 5))) == ()
    first, second = [record for record in caplog.records if record.exc_info]
    assert first.getMessage() == "moonstep-push-0: push of 1 objects for request request-7 failed"
    assert (
        second.getMessage() == "moonstep-fetch-0: fetch of 2 objects for request request-8 failed"
    )
    assert "broken on command" in caplog.text


def test_an_exception_before_the_store_is_asked_is_an_end_as_well(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="moonstep"):
        assert desk.run(push(1, StoredObject(9, b"no such group", None, (0,)))) == ()
        assert desk.run(push(2, stored("a", 3))) == (True,)
    assert "IndexError" in caplog.text


def test_a_store_that_is_unwell_is_mentioned_once_and_once_when_it_is_well(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="moonstep"):
        desk.run(push(1, stored("a", 3)))
        desk.faulty.fault = Fault.UNWELL
        for number in range(2, 5):
            assert desk.run(push(number, stored("b", 3))) == ()
            assert desk.run(fetch(10 + number, stored("a", 4))) == ()
        desk.faulty.fault = Fault.NONE
        for number in range(5, 7):
            desk.run(push(number, stored("c", 3)))
    assert [record.getMessage() for record in caplog.records] == [
        "moonstep: the store is unwell, requests go on without it: unwell on command",
        "moonstep: the store is well again",
    ]


class Watched(queue.Queue[Job | None]):
    """A queue that counts what was taken and what was said to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.done = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Job | None:
        job = super().get(block, timeout)
        self.taken += 1
        return job

    def task_done(self) -> None:
        self.done += 1
        super().task_done()


@pytest.mark.parametrize("kind", [BaseSendingThread, BaseReceivingThread])
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.UNWELL, Fault.BROKEN, Fault.TOO_FEW])
def test_every_item_is_done_once_and_none_ends_the_thread(
    kind: type[BaseSendingThread], fault: Fault
) -> None:
    jobs, ends = Watched(), list[JobEnd]()
    store = CheckedStore(FaultyStore(MemoryStore(), fault))
    spans = ObjectSpans(Arena(4, SLOT_BYTES), 0, [SLOT_BYTES])
    thread = kind("thread", jobs, store, spans, ends.append, Wellbeing())
    for number in range(5):
        jobs.put(push(number, stored("a", 0)))
    jobs.put(None)
    jobs.put(push(99))
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert [end.number for end in ends] == [0, 1, 2, 3, 4]
    assert (jobs.taken, jobs.done) == (6, 6)


def test_a_report_that_raises_leaves_no_item_undone() -> None:
    """Nothing is known to raise there; if it does, whoever joins the queue is not left waiting."""
    jobs = Watched()

    def report(end: JobEnd) -> None:
        raise RuntimeError("no mailbox")

    spans = ObjectSpans(Arena(4, SLOT_BYTES), 0, [SLOT_BYTES])
    thread = BaseSendingThread("thread", jobs, MemoryStore(), spans, report, Wellbeing())
    jobs.put(push(1))
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        thread.start()
        thread.join(SOON_S)
    finally:
        threading.excepthook = hook
    assert (jobs.taken, jobs.done) == (1, 1)


def test_pushes_that_hang_hold_up_no_fetch(desk: Desk) -> None:
    desk.run(push(1, stored("a", 3)))
    desk.faulty.only = frozenset({"put"})
    desk.faulty.fault = Fault.HANGING
    desk.jobs.start([push(2, stored("b", 4)), push(3, stored("c", 5))])
    assert desk.faulty.wait_until_hanging(1, SOON_S)
    assert desk.run(fetch(4, stored("a", 0, generation=2))) == (True,)


def closed_in_s(close: Callable[[float], bool], deadline_s: float) -> float:
    start_s = time.monotonic()
    assert not close(deadline_s)
    return time.monotonic() - start_s


@pytest.mark.parametrize("verb", ["put", "get", "close"])
def test_a_store_that_hangs_holds_up_no_shutdown(
    verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(threads=4)
    desk.faulty.only = frozenset({verb})
    desk.faulty.fault = Fault.HANGING
    for number in range(10):
        desk.jobs.start([push(number, stored("a", 3)), fetch(100 + number, stored("b", 4))])
    if verb != "close":
        assert desk.faulty.wait_until_hanging(2, SOON_S)
    with caplog.at_level(logging.WARNING, logger="moonstep"):
        assert closed_in_s(desk.jobs.close, 0.2) < 5.0
    assert "still in a call" in caplog.text
    left = [thread for thread in threading.enumerate() if thread.name.startswith("moonstep-")]
    assert left
    assert all(thread.daemon for thread in left)
    desk.faulty.fault = Fault.NONE
    desk.faulty.resume()
    for thread in left:
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_the_store_is_closed_by_a_thread_that_may_hang_in_it() -> None:
    closed_by: list[str] = []

    class Closing(MemoryStore):
        def close(self) -> None:
            closed_by.append(threading.current_thread().name)
            raise ZeroDivisionError("close is broken")

    jobs = StoreJobs(Arena(1, SLOT_BYTES), Closing(), 0, [SLOT_BYTES], 2)
    assert jobs.close(SOON_S)
    assert closed_by == ["moonstep-close"]


class Gate(MemoryStore):
    """A store whose puts and gets touch memory only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        self.entered.set()
        assert self.go.wait(SOON_S)
        return super().put(items)

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        self.entered.set()
        assert self.go.wait(SOON_S)
        return super().get(items)


@pytest.fixture
def gated() -> Iterator[tuple[MooncakeStoreWorker, Gate, KvMemory]]:
    memory, gate = kv_memory(piece_bytes=((100, 24, 64),)), Gate()
    settings = Settings(
        host_cache_bytes=SLOTS * slot_bytes(memory.pieces), store_threads=2, shutdown_deadline_s=5
    )
    worker = MooncakeStoreWorker(settings, 0, 1, BLOCKS, memory.pieces, store=gate)
    yield worker, gate, memory
    gate.go.set()
    worker.shutdown()


def ended(worker: MooncakeStoreWorker) -> JobEnd:
    stop_s = time.monotonic() + SOON_S
    while time.monotonic() < stop_s:
        report = worker.report()
        if report is not None and report.by_rank[0].ended_jobs:
            (end,) = report.by_rank[0].ended_jobs
            return end
        threading.Event().wait(0.001)
    raise AssertionError("the job has not ended")


def test_a_slot_that_a_fetch_owns_is_restored_by_nobody(
    gated: tuple[MooncakeStoreWorker, Gate, KvMemory],
) -> None:
    """A restore of it is stopped while the fetch runs, whatever generation it names."""
    worker, gate, memory = gated
    worker.capture(StepPlan(0, captures=as_rows([(0, 3, 7, 1)])))
    gate.go.set()
    content = memory.block(0, 3)
    worker.capture(StepPlan(1, jobs=(push(1, stored("a", 7)),)))
    assert ended(worker).done == (True,)
    gate.go.clear()
    gate.entered.clear()
    worker.capture(StepPlan(2, jobs=(fetch(2, stored("a", 7, generation=2)),)))
    assert gate.entered.wait(SOON_S)
    for generation in (1, 2):
        with pytest.raises(StaleSlot):
            worker.restore(StepPlan(3, restores=as_rows([(0, 5, 7, generation)])))
    gate.go.set()
    assert ended(worker).done == (True,)
    worker.restore(StepPlan(4, restores=as_rows([(0, 5, 7, 2)])))
    assert memory.block(0, 5) == content


def test_jobs_of_a_step_whose_captures_are_never_asked_for_begin_with_the_next(
    gated: tuple[MooncakeStoreWorker, Gate, KvMemory],
) -> None:
    worker, gate, _ = gated
    gate.go.set()
    worker.restore(StepPlan(0, jobs=(push(1, stored("a", 7)),)))
    worker.restore(StepPlan(1))
    assert ended(worker).number == 1
    worker.capture(StepPlan(1))
    worker.shutdown()
    assert worker.jobs is not None
    assert worker.jobs.collect() == ()


def test_jobs_of_a_step_are_started_once(
    gated: tuple[MooncakeStoreWorker, Gate, KvMemory],
) -> None:
    worker, gate, _ = gated
    gate.go.set()
    plan = StepPlan(0, jobs=(push(1, stored("a", 7)),))
    worker.restore(plan)
    worker.capture(plan)
    assert ended(worker).number == 1
    worker.restore(StepPlan(1))
    worker.shutdown()
    assert worker.jobs is not None
    assert worker.jobs.collect() == ()


def test_a_worker_shuts_down_in_time_while_its_store_hangs() -> None:
    memory = kv_memory(piece_bytes=((100, 24, 64),))
    faulty = FaultyStore(MemoryStore(), Fault.HANGING)
    settings = Settings(host_cache_bytes=SLOTS * slot_bytes(memory.pieces), shutdown_deadline_s=0.2)
    worker = MooncakeStoreWorker(settings, 0, 1, BLOCKS, memory.pieces, store=faulty)
    worker.capture(StepPlan(0, jobs=(push(1, stored("a", 7)), fetch(2, stored("b", 6)))))
    assert faulty.wait_until_hanging(2, SOON_S)
    start_s = time.monotonic()
    worker.shutdown()
    assert time.monotonic() - start_s < 5.0
    faulty.fault = Fault.NONE
    faulty.resume()
