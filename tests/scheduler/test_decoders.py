"""Tables of lives that nobody looks at: read at any time, they are what lists would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonstep.scheduler.decoders import Decoders
from moonstep.scheduler.tables import BlockTables
from moonstep.scheduler.tracker import RequestTracker

LIVES = 5
LOOKS = st.sets(st.integers(0, LIVES - 1))


def life(number: int, blocks: list[int]) -> RequestTracker:
    request: Any = SimpleNamespace(request_id=f"r{number}")
    tracker = RequestTracker(number, request, BlockTables([blocks]), [0], saves=True)
    tracker.sources = [100 + number]
    return tracker


@given(
    st.lists(st.tuples(st.sets(st.integers(0, LIVES - 1), min_size=1), LOOKS, LOOKS), max_size=60)
)
def test_tables_are_what_lists_would_be(steps: list[tuple[set[int], set[int], set[int]]]) -> None:
    """In each step some lives grow, some tables are read, some lives end and begin anew."""
    decoders = Decoders()
    trackers = [life(n, [n, n]) for n in range(LIVES)]
    expected = [[n, n] for n in range(LIVES)]
    for tracker in trackers:
        decoders.enter(tracker)
    for step, (growing, read, ended) in enumerate(steps):
        order = sorted(growing)
        blocks = [1000 * step + n for n in order]
        seats = [decoders.seat_of[f"r{n}"] for n in order]
        grown = decoders.grew(seats, blocks)
        assert list(grown.blocks) == blocks
        assert list(grown.sources) == [100 + n for n in order]
        assert list(grown.depths) == [len(expected[n]) for n in order]
        for n, block in zip(order, blocks, strict=True):
            expected[n].append(block)
        for n in read:
            assert trackers[n].tables.by_group == [expected[n]]
        for n in ended:
            decoders.leave(f"r{n}")
            assert trackers[n].tables.by_group == [expected[n]]
            expected[n] = [n]
            trackers[n] = life(n, [n])
            decoders.enter(trackers[n])
    for tracker, blocks in zip(trackers, expected, strict=True):
        assert tracker.tables.by_group == [blocks]


def test_a_table_that_outlives_its_seat_gets_nothing_of_the_next_life() -> None:
    decoders = Decoders()
    first, second = life(1, [1]), life(2, [2])
    decoders.enter(first)
    decoders.leave("r1")
    decoders.enter(second)
    decoders.grew([decoders.seat_of["r2"]], [7])
    assert first.tables.by_group == [[1]]
    assert second.tables.by_group == [[2, 7]]


def test_what_comes_after_a_reset_is_nobody_s() -> None:
    decoders = Decoders()
    decoders.enter(life(1, [1]))
    decoders.forget_sources()
    assert list(decoders.grew([decoders.seat_of["r1"]], [7]).sources) == [0]
