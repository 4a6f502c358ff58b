"""Captures under way: a step counts only when every rank lists it; silence means failure."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.scheduler.captures import Capture
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.ledger import CaptureLedger, Settled
from moonstep.scheduler.slots import Placed
from moonstep.wire import RankReport, WorkerReport


def captures(step: int, count: int = 2) -> list[Capture]:
    """What a step captures: two batches of blocks named after it."""
    batches = []
    for batch in range(2):
        columns = Columns(0)
        columns.add_run(
            step, 0, [f"{step}.{batch}.{i}".encode() for i in range(count)], [1] * count
        )
        batches.append(Capture(Placed(columns, list(range(count)), step), engine_keeps=True))
    return batches


def ledger_with(ranks: int, *steps: int) -> CaptureLedger:
    ledger = CaptureLedger(ranks)
    for step in steps:
        ledger.open(step, captures(step))
    return ledger


def outcomes(settled: list[Settled]) -> dict[int, bool]:
    return {one.step: one.captured for one in settled}


def settle(ledger: CaptureLedger, **reports: tuple[int, tuple[int, ...]]) -> dict[int, bool]:
    """Settle with reports written as ``r0=(through, captured)``."""
    by_rank = {
        int(rank[1:]): RankReport(slots=8, through=through, captured=captured)
        for rank, (through, captured) in reports.items()
    }
    return outcomes(list(ledger.settle(by_rank)))


def test_a_step_waits_for_every_rank() -> None:
    ledger = ledger_with(2, 1)
    assert settle(ledger, r0=(1, (1,))) == {}
    assert len(ledger) == 4
    assert settle(ledger, r1=(1, (1,))) == {1: True}
    assert len(ledger) == 0


def test_one_rank_that_never_lists_a_step_has_failed_it() -> None:
    ledger = ledger_with(2, 1, 2)
    assert settle(ledger, r0=(2, (1, 2)), r1=(2, (2,))) == {1: False, 2: True}


def test_a_report_that_does_not_reach_a_step_says_nothing_of_it() -> None:
    ledger = ledger_with(1, 3, 5)
    assert settle(ledger, r0=(3, (3,))) == {3: True}
    assert settle(ledger, r0=(4, ())) == {}
    assert settle(ledger, r0=(5, ())) == {5: False}


def test_a_failure_is_not_forgotten_while_another_rank_is_waited_for() -> None:
    ledger = ledger_with(2, 1)
    assert settle(ledger, r0=(1, ())) == {}
    assert settle(ledger, r0=(2, (1,))) == {}  # too late: the rank has spoken
    assert settle(ledger, r1=(1, (1,))) == {1: False}


def test_reports_of_steps_nobody_planned_settle_nothing() -> None:
    ledger = ledger_with(1, 7)
    assert settle(ledger, r0=(6, (1, 2, 99))) == {}
    assert settle(ledger, r5=(9, (7,))) == {}
    assert settle(ledger, r0=(7, (7,))) == {7: True}
    assert settle(ledger, r0=(8, (7,))) == {}


STEPS = range(1, 9)
FAILS = st.sets(st.tuples(st.integers(0, 2), st.sampled_from(STEPS)))


@settings(max_examples=200, deadline=None)
@given(
    ranks=st.integers(1, 3), planned=st.sets(st.sampled_from(STEPS)), fails=FAILS, data=st.data()
)
def test_every_capture_settles_exactly_once(
    ranks: int, planned: set[int], fails: set[tuple[int, int]], data: st.DataObject
) -> None:
    """Ranks report when they like, together or alone, merged or not; every step ends once."""
    ledger = CaptureLedger(ranks)
    unreported: dict[int, list[RankReport]] = {rank: [] for rank in range(ranks)}
    ended: list[Settled] = []

    def report(rank: int) -> None:
        reports = unreported[rank]
        if not reports:
            return
        count = data.draw(st.integers(1, len(reports)), label=f"reports of rank {rank}")
        merged = WorkerReport({rank: reports[0]})
        for later in reports[1:count]:
            merged = merged.aggregate(WorkerReport({rank: later}))
        del reports[:count]
        ended.extend(ledger.settle(merged.by_rank))

    for step in STEPS:
        if step in planned:
            ledger.open(step, captures(step))
        for rank in range(ranks):
            listed = () if (rank, step) in fails or step not in planned else (step,)
            unreported[rank].append(RankReport(slots=8, through=step, captured=listed))
        for rank in data.draw(st.lists(st.integers(0, ranks - 1), max_size=3), label="who reports"):
            report(rank)
    for rank in range(ranks):
        while unreported[rank]:
            report(rank)

    assert sorted(one.step for one in ended) == sorted(planned)
    assert len(ledger) == 0
    for one in ended:
        assert one.captures == captures(one.step)
        assert one.captured == all((rank, one.step) not in fails for rank in range(ranks))
