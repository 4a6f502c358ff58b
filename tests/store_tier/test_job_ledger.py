"""Every job ends once, when every rank has spoken; a deadline ends the waiting, never the job."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moonstep.keys import KeyMaker
from moonstep.scheduler.jobs import JobLedger, OpenJob
from moonstep.wire import Job, JobEnd, JobKind, RankReport, StoredObject

RANKS = 2
KEYS = KeyMaker("default", "0")


def make_job(number: int, objects: int = 2) -> Job:
    stored = tuple(StoredObject(0, bytes([number, at]), None, (at,)) for at in range(objects))
    return Job(number, JobKind.PUSH, "r", KEYS, stored)


def report(*ends: JobEnd) -> RankReport:
    return RankReport(slots=0, through=0, ended_jobs=ends)


def opened(*numbers: int, deadline_s: float = 10.0) -> JobLedger[None]:
    ledger: JobLedger[None] = JobLedger(RANKS)
    for number in numbers:
        ledger.open(make_job(number), None, 3, deadline_s)
    return ledger


def test_a_job_ends_when_the_last_rank_says_so() -> None:
    ledger = opened(1)
    assert ledger.settle({1: report(JobEnd(1, (True, True)))}) == []
    assert ledger.busy_slots == 3
    (ended,) = ledger.settle({0: report(JobEnd(1, (True, False)))})
    assert ended.done == [True, False]
    assert (len(ledger), ledger.busy_slots) == (0, 0)


def test_what_a_rank_does_not_say_did_not_come() -> None:
    for short in ((), (True,)):
        ledger = opened(1)
        (ended,) = ledger.settle({0: report(JobEnd(1, (True, True))), 1: report(JobEnd(1, short))})
        assert ended.done == [len(short) > 0, False]


def test_one_rank_cannot_speak_for_two() -> None:
    ledger = opened(1)
    end = JobEnd(1, (True, True))
    assert ledger.settle({0: report(end, end)}) == []
    assert ledger.settle({0: report(JobEnd(1, ()))}) == []
    assert ledger.busy_slots == 3
    (ended,) = ledger.settle({1: report(end)})
    assert ended.done == [True, True], "its first word counts"


def test_ends_of_unknown_jobs_are_passed_over() -> None:
    ledger = opened(7)
    assert ledger.settle({0: report(JobEnd(6, ())), 1: report(JobEnd(8, (True,)))}) == []
    assert len(ledger) == 1


def test_an_abandoned_job_keeps_its_slots_until_it_ends() -> None:
    ledger = opened(1, deadline_s=10.0)
    assert ledger.abandon_late(9.9) == []
    assert ledger.quarantined_slots == 0
    (late,) = ledger.abandon_late(10.0)
    assert late.job.number == 1
    assert ledger.abandon_late(1e9) == []
    assert (ledger.busy_slots, ledger.quarantined_slots) == (3, 3)
    assert (ledger.awaited, ledger.abandoned) == (0, 1)
    end = report(JobEnd(1, (True, True)))
    (ended,) = ledger.settle({0: end, 1: end})
    assert ended is late
    assert (ledger.busy_slots, ledger.quarantined_slots) == (0, 0)


Events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 4)),
        st.tuples(st.just("time"), st.integers(0, 3)),
        st.tuples(
            st.just("end"),
            st.integers(0, RANKS - 1),
            st.integers(0, 12),
            st.lists(st.booleans(), max_size=3),
        ),
    ),
    max_size=60,
)


@given(Events)
def test_whatever_ranks_report_each_job_ends_once_and_owns_its_slots_until_then(
    events: list[tuple[object, ...]],
) -> None:
    ledger: JobLedger[None] = JobLedger(RANKS)
    number, now_s = 0, 0.0
    said: dict[int, dict[int, tuple[bool, ...]]] = {}
    slots: dict[int, int] = {}
    late: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for event in events:
        match event:
            case ("open", int(slot_count)):
                number += 1
                ledger.open(make_job(number), None, slot_count, now_s + 2)
                said[number], slots[number] = {}, slot_count
            case ("time", int(seconds)):
                now_s += seconds
                late.update(entry.job.number for entry in ledger.abandon_late(now_s))
            case ("end", int(rank), int(of), list(done)):
                if of in said:
                    said[of].setdefault(rank, tuple(done))
                entries: list[OpenJob[None]] = ledger.settle(
                    {rank: report(JobEnd(of, tuple(done)))}
                )
                for entry in entries:
                    ended[entry.job.number] += 1
                    answers = said[entry.job.number]
                    assert len(answers) == RANKS
                    for at, is_there in enumerate(entry.done):
                        assert is_there == all(a[at : at + 1] == (True,) for a in answers.values())
        open_now = {n for n, answers in said.items() if len(answers) < RANKS}
        assert ledger.busy_slots == sum(slots[n] for n in open_now)
        assert ledger.quarantined_slots == sum(slots[n] for n in open_now & late.keys())
        assert set(ended) == set(said) - open_now
    assert set(ended.values()) <= {1}
    assert set(late.values()) <= {1}
