"""Jobs in child processes: one that hangs or dies costs itself only."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.audit.jobs import Pool


@dataclass(frozen=True)
class Numbers:
    """Answers with a number's double; -1 hangs, -2 ends the process."""

    numbers: tuple[int, ...]
    deadline_s: float = 1.0

    def parts(self) -> Sequence[int]:
        return self.numbers

    def run(self, part: int) -> int:
        if part == -1:
            time.sleep(60)
        if part == -2:
            os._exit(3)
        return 2 * part


def test_what_hangs_or_dies_is_told_and_the_rest_is_done() -> None:
    jobs = [Numbers((1, -1, 2)), Numbers((-2, 3)), Numbers((4, 5))]
    with Pool(1, None, start_s=20.0) as pool:
        done = {one.part: (one.value, one.problem) for one in pool.run(jobs)}  # type: ignore[arg-type]
    assert done == {
        1: (2, None),
        -1: (None, "deadline"),
        2: (4, None),
        -2: (None, "the process died"),
        3: (6, None),
        4: (8, None),
        5: (10, None),
    }


def test_a_process_that_died_between_jobs_is_replaced() -> None:
    with Pool(1, None) as pool:
        assert [one.value for one in pool.run([Numbers((1,))])] == [2]  # type: ignore[list-item]
        for process in multiprocessing.active_children():
            if process.name == "audit":
                process.kill()
                process.join(20.0)
        (done,) = pool.run([Numbers((2,))])  # type: ignore[list-item]
    assert (done.value, done.problem) == (4, None)


def test_no_further_job_begins_once_it_is_enough() -> None:
    seen: list[int] = []
    with Pool(1, None) as pool:
        jobs = [Numbers((1,)), Numbers((2,)), Numbers((3,))]
        for one in pool.run(jobs, lambda: bool(seen)):  # type: ignore[arg-type]
            seen.append(one.part)  # noqa: PERF401
    assert seen == [1]
