"""What the halves say to each other: small when pickled, whole when merged, never shared."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonstep.wire import (
    NO_ROWS,
    ROW_COLUMNS,
    RankReport,
    ReqMeta,
    StepPlan,
    StoreCalls,
    WorkerReport,
    join_rows,
    make_rows,
)


def pickled_bytes(message: object) -> int:
    return len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def test_rows_keep_their_order_and_columns() -> None:
    rows = join_rows([make_rows(0, [7, 5], [3, 4], [1, 6]), make_rows(1, [8], [2], 9)])
    assert rows.dtype == np.int32
    assert rows.tolist() == [[0, 7, 3, 1], [0, 5, 4, 6], [1, 8, 2, 9]]
    assert make_rows(0, [], [], 1).shape == (0, ROW_COLUMNS)
    assert join_rows([]).shape == (0, ROW_COLUMNS)


def test_a_plan_with_nothing_to_do_is_empty_and_tiny() -> None:
    assert StepPlan(3).is_empty
    assert pickled_bytes(StepPlan(3)) < 400
    assert not StepPlan(3, captures=make_rows(0, [1], [2], 3)).is_empty
    assert not StepPlan(3, restores=make_rows(0, [1], [2], 3)).is_empty
    assert not StepPlan(3, received=("r",)).is_empty


def test_no_two_plans_share_rows_that_could_be_written() -> None:
    assert StepPlan(1).restores is NO_ROWS
    assert join_rows([]) is NO_ROWS
    assert NO_ROWS.size == 0


def test_a_plan_for_a_million_tokens_is_one_buffer() -> None:
    blocks = 1_000_000 // 16
    plan = StepPlan(1, restores=make_rows(0, range(1, blocks + 1), range(blocks), 1))
    assert pickled_bytes(plan) < blocks * ROW_COLUMNS * 4 + 500


def test_a_plan_comes_out_of_pickle_as_it_went_in() -> None:
    plan = StepPlan(
        5,
        restores=make_rows(0, [1], [2], 3),
        captures=make_rows(0, [4], [5], 6),
        restores_of=(ReqMeta("r", 0, 1),),
        received=("s",),
    )
    other = pickle.loads(pickle.dumps(plan))
    assert other.restores.tolist() == [[0, 1, 2, 3]]
    assert other.captures.tolist() == [[0, 4, 5, 6]]
    assert (other.step, other.restores_of, other.received) == (5, plan.restores_of, ("s",))


CALLS = st.builds(
    StoreCalls, nbytes=st.integers(0, 99), ended_ns=st.integers(0, 9).map(lambda ns: (ns,))
)
REPORTS = st.builds(
    RankReport,
    slots=st.integers(0, 9),
    through=st.integers(-1, 9),
    captured=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    capture_bytes=st.integers(0, 99),
    restore_bytes=st.integers(0, 99),
    puts=CALLS,
)
WORKERS = st.builds(WorkerReport, st.dictionaries(st.integers(0, 2), REPORTS, max_size=3))


@given(WORKERS, WORKERS)
def test_nothing_a_rank_listed_is_lost_in_merging(one: WorkerReport, other: WorkerReport) -> None:
    both = one.aggregate(other)
    assert both.by_rank.keys() == one.by_rank.keys() | other.by_rank.keys()
    for rank, merged in both.by_rank.items():
        parts = [r.by_rank[rank] for r in (one, other) if rank in r.by_rank]
        assert merged.captured == tuple(step for part in parts for step in part.captured)
        assert merged.through == max(part.through for part in parts)
        assert merged.capture_bytes == parts[-1].capture_bytes
        assert merged.slots == parts[-1].slots
        assert merged.puts.nbytes == parts[-1].puts.nbytes
        assert merged.puts.ended_ns == tuple(ns for part in parts for ns in part.puts.ended_ns)


@given(WORKERS, WORKERS, WORKERS)
def test_merging_in_any_grouping_says_the_same(
    a: WorkerReport, b: WorkerReport, c: WorkerReport
) -> None:
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))
    assert pickle.loads(pickle.dumps(a)) == a
