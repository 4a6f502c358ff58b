"""The demo's verdicts: each promise kept, and each one broken alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moonstep.demo.figures import EngineFigures, StoreFigures, checks, store_checks

GOOD = EngineFigures(
    start_s=5.0,
    first_visit_s=3.0,
    repeat_s=0.060,
    return_s=0.080,
    restored_bytes=100e6,
    memcpy_bytes_per_s=5e9,
    connector_s=0.3,
    step_s=15.0,
    gap_median_s=0.050,
    gap_worst_s=0.090,
    gap_floor_s=0.080,
    storm_s=20.0,
    preemptions=4,
    storm_restored_tokens=500,
    answers=((1, 2), (3,)),
    later_answers=((1, 2), (1, 2)),
    storm_answers=((4,), (5,)),
)


def failing(plain: EngineFigures, ours: EngineFigures) -> list[str]:
    return [check.name for check in checks(plain, ours) if not check.holds]


def test_a_good_run_keeps_every_promise() -> None:
    assert failing(GOOD, GOOD) == []


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"return_s": 0.091}, "floor"),  # 60 ms + 1.5 x 100 MB / 5 GB/s = 90 ms
        ({"restored_bytes": 0.0}, "floor"),
        ({"connector_s": 0.46}, "share"),
        ({"gap_worst_s": 0.101}, "gap"),
        ({"preemptions": 0}, "preemptions"),
        ({"storm_restored_tokens": 0}, "restored"),
        ({"storm_answers": ((4,), (6,))}, "storm: answers"),
        ({"answers": ((1, 2), (9,))}, "answers that differ from"),
        ({"later_answers": ((1, 2), (9, 9))}, "answers that differ from"),
    ],
)
def test_each_broken_promise_is_named_and_no_other(change: dict[str, Any], about: str) -> None:
    (name,) = failing(GOOD, dataclasses.replace(GOOD, **change))
    assert about in name


def test_a_wrong_answer_is_told_from_a_late_one() -> None:
    wrong = dataclasses.replace(GOOD, storm_answers=((4,), (6,)), gap_worst_s=9.0)
    told = {check.name: check.about_answers for check in checks(GOOD, wrong) if not check.holds}
    assert sorted(told.values()) == [False, True]


STORED = StoreFigures(
    cold_s=3.0,
    warm_s=0.3,
    restored_tokens=(2432, 2432),
    cold_answers=((1, 2), (3,)),
    warm_answers=((1, 2), (3,)),
)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({}, None),
        ({"warm_s": 1.06}, "0.35 x cold"),
        ({"restored_tokens": (2432, 0)}, "0.35 x cold"),
        ({"warm_answers": ((1, 2), (4,))}, "answers that differ after a restart"),
    ],
)
def test_a_store_is_judged_by_what_comes_after_a_restart(
    change: dict[str, Any], about: str | None
) -> None:
    broken = [c.name for c in store_checks(dataclasses.replace(STORED, **change)) if not c.holds]
    assert len(broken) == (about is not None)
    assert about is None or about in broken[0]
