"""The worker half: guarded restores, captures that count only whole, and reports of both."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonstep.wire import RankReport, ReqMeta, Rows, StepPlan, WorkerReport
from moonstep.worker.arena import EMPTY, Arena
from moonstep.worker.device import CpuDevice, Ticket
from moonstep.worker.rows import BadRow
from moonstep.worker.worker import MooncakeStoreWorker, StaleSlot
from tests.worker.conftest import BLOCKS, SLOTS, KvMemory, WorkerOn, as_rows, kv_memory


def captures(step: int, *rows: tuple[int, int, int, int]) -> StepPlan:
    return StepPlan(step, captures=as_rows(list(rows)))


def restores(step: int, *rows: tuple[int, int, int, int], request_id: str = "r") -> StepPlan:
    return StepPlan(
        step, restores=as_rows(list(rows)), restores_of=(ReqMeta(request_id, 0, len(rows)),)
    )


def rank_report(worker: MooncakeStoreWorker) -> RankReport:
    report = worker.report()
    assert report is not None
    return report.by_rank[0]


class FailingDevice(CpuDevice):
    """A device on which every capture fails after it has written half of its rows."""

    def capture(self, rows: Rows) -> Ticket:
        super().capture(rows[: len(rows) // 2])
        raise RuntimeError("the copy engine is on fire")


def test_what_was_captured_is_restored(worker_on: WorkerOn) -> None:
    memory = kv_memory()
    worker = worker_on(memory)
    first, second = memory.block(0, 3), memory.block(1, 4)
    worker.capture(captures(0, (0, 3, 7, 1), (1, 4, 2, 1)))
    memory.buffer[:] = 0
    worker.restore(restores(1, (0, 9, 7, 1), (1, 8, 2, 1)))
    assert memory.block(0, 9) == first
    assert memory.block(1, 8) == second
    assert not any(memory.block(0, 3) + memory.block(1, 4))


def test_a_restore_reads_what_was_there_before_the_capture_of_its_step(worker_on: WorkerOn) -> None:
    memory = kv_memory()
    worker = worker_on(memory)
    old, new = memory.block(0, 3), memory.block(0, 4)
    worker.capture(captures(0, (0, 3, 7, 1)))
    plan = StepPlan(1, restores=as_rows([(0, 9, 7, 1)]), captures=as_rows([(0, 4, 7, 2)]))
    worker.restore(plan)
    worker.capture(plan)
    assert memory.block(0, 9) == old
    worker.restore(restores(2, (0, 9, 7, 2)))
    assert memory.block(0, 9) == new


@pytest.mark.parametrize(
    "stale",
    [(0, 9, 7, 0), (0, 9, 7, 2), (0, 9, 8, 1), (0, 9, 8, EMPTY), (0, 9, SLOTS, 1), (0, 9, -3, 1)],
    ids=["older", "newer", "never written", "empty", "no such slot", "negative slot"],
)
def test_one_stale_slot_stops_a_restore_before_its_first_byte(
    worker_on: WorkerOn, stale: tuple[int, int, int, int]
) -> None:
    memory = kv_memory()
    worker = worker_on(memory)
    worker.capture(captures(0, (0, 3, 7, 1), (0, 4, 6, 1)))
    before = memory.buffer.copy()
    plan = StepPlan(
        1,
        restores=as_rows([(0, 10, 6, 1), stale]),
        restores_of=(ReqMeta("good", 0, 1), ReqMeta("bad", 1, 2)),
    )
    with pytest.raises(StaleSlot, match=f"request bad: slot {stale[2]} is to be restored"):
        worker.restore(plan)
    assert np.array_equal(memory.buffer, before)


def test_a_restore_into_no_block_stops_before_its_first_byte(worker_on: WorkerOn) -> None:
    memory = kv_memory()
    worker = worker_on(memory)
    worker.capture(captures(0, (0, 3, 7, 1)))
    before = memory.buffer.copy()
    for block in (0, BLOCKS):
        with pytest.raises(BadRow):
            worker.restore(restores(1, (0, 5, 7, 1), (0, block, 7, 1)))
    assert np.array_equal(memory.buffer, before)


def test_a_failed_capture_is_logged_not_reported_and_leaves_nothing_to_restore(
    worker_on: WorkerOn, caplog: pytest.LogCaptureFixture
) -> None:
    memory = kv_memory()
    worker = worker_on(memory)
    worker.capture(captures(0, (0, 3, 7, 1), (0, 4, 6, 1), (0, 5, 5, 1)))
    worker._device = FailingDevice(worker.arena, memory.pieces, BLOCKS)
    with caplog.at_level(logging.ERROR):
        worker.capture(captures(1, (0, 8, 7, 2), (0, 9, 6, 2)))
    assert "capture of step 1 failed" in caplog.text
    assert "on fire" in caplog.text
    report = rank_report(worker)
    assert (report.captured, report.through) == ((0,), 1)
    for slot in (6, 7):
        for generation in (1, 2):
            with pytest.raises(StaleSlot):
                worker.restore(restores(2, (0, 9, slot, generation)))
    worker.restore(restores(2, (0, 9, 5, 1)))
    assert worker.stats.failed_captures == 1


def test_a_capture_with_a_bad_row_empties_the_slots_it_names(worker_on: WorkerOn) -> None:
    worker = worker_on(kv_memory())
    worker.capture(captures(0, (0, 3, 7, 1)))
    worker.capture(captures(1, (0, 4, 7, 2), (0, 0, SLOTS, 2)))
    report = rank_report(worker)
    assert (report.captured, report.through) == ((0,), 1)
    assert worker.arena.generation[7] == EMPTY


def test_slots_are_told_first_and_nothing_twice(worker_on: WorkerOn) -> None:
    worker = worker_on(kv_memory())
    assert worker.report() == WorkerReport({0: RankReport(slots=SLOTS, through=-1)})
    assert worker.report() is None
    worker.capture(StepPlan(0))
    assert worker.report() is None
    worker.capture(captures(1, (0, 3, 7, 1)))
    worker.capture(captures(2, (1, 3, 8, 1)))
    report = rank_report(worker)
    assert (report.captured, report.through) == ((1, 2), 2)
    assert report.capture_bytes == 188 + 40
    assert worker.report() is None


def test_a_report_before_the_capture_of_its_step_tells_of_earlier_steps(
    worker_on: WorkerOn,
) -> None:
    worker = worker_on(kv_memory())
    worker.capture(captures(0, (0, 3, 7, 1)))
    assert rank_report(worker).through == 0
    worker.restore(restores(1, (0, 4, 7, 1)))
    report = rank_report(worker)
    assert (report.captured, report.through, report.restore_bytes) == ((), 0, 188)
    worker.capture(captures(1, (0, 3, 7, 2)))
    assert rank_report(worker).captured == (1,)


class HeldTicket:
    """The ticket of a copy that ends when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def ended(self) -> bool:
        return self.is_over


class HeldDevice(CpuDevice):
    def __init__(self, arena: Arena, memory: KvMemory) -> None:
        super().__init__(arena, memory.pieces, BLOCKS)
        self.tickets: list[HeldTicket] = []

    def capture(self, rows: Rows) -> Ticket:
        super().capture(rows)
        self.tickets.append(HeldTicket())
        return self.tickets[-1]


def test_steps_count_in_order_once_their_copies_have_ended(worker_on: WorkerOn) -> None:
    memory = kv_memory()
    worker = worker_on(memory)
    worker._device = device = HeldDevice(worker.arena, memory)
    assert rank_report(worker).through == -1
    for step in range(3):
        worker.capture(captures(step, (0, 3, step, 1)))
    worker.capture(StepPlan(3))
    device.tickets[1].is_over = True
    assert worker.report() is None
    device.tickets[0].is_over = True
    report = rank_report(worker)
    assert (report.captured, report.through) == ((0, 1), 1)
    device.tickets[2].is_over = True
    report = rank_report(worker)
    assert (report.captured, report.through) == ((2,), 3)


def test_the_host_cache_is_divided_over_the_ranks() -> None:
    from moonstep.config import Settings

    pieces = kv_memory().pieces
    for world_size, slots in ((1, 10), (3, 3), (16, 0)):
        worker = MooncakeStoreWorker(
            Settings(host_cache_bytes=10 * 192), 0, world_size, BLOCKS, pieces
        )
        assert worker.slots == slots
        worker.shutdown()


ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, BLOCKS - 1), st.integers(0, SLOTS - 1)),
    min_size=1,
    max_size=5,
    unique_by=lambda row: row[2],
)


@given(steps=st.lists(st.tuples(st.booleans(), ROWS), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_history_agrees_with_a_dictionary(
    worker_on: WorkerOn, steps: list[tuple[bool, list[tuple[int, int, int]]]]
) -> None:
    """Slots against a plain model: generation and bytes of the last capture, or stale."""
    memory = kv_memory()
    worker = worker_on(memory)
    kept: dict[int, tuple[int, int, bytes]] = {}
    for step, (is_capture, rows) in enumerate(steps):
        if is_capture:
            for group, block, slot in rows:
                kept[slot] = (step, group, memory.block(group, block))
            worker.capture(captures(step, *[(*row, step) for row in rows]))
            continue
        for group, block, slot in rows:
            generation, kept_group, content = kept.get(slot, (0, group, b""))
            if slot not in kept:
                with pytest.raises(StaleSlot):
                    worker.restore(restores(step, (group, block, slot, generation)))
                continue
            worker.restore(restores(step, (kept_group, block, slot, generation)))
            assert memory.block(kept_group, block) == content
