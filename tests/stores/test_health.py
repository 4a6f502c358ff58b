"""The circuit breaker and the pause, as plain state machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonstep.stores.health import Backoff, Breaker, Pause, State

BACKOFF = Backoff(first_s=1.0, most_s=8.0, spread=0.5)


def breaker(jitter: float = 0.0) -> Breaker:
    return Breaker(BACKOFF, lambda: jitter)


def probe_in_vain(it: Breaker, now_s: float) -> float:
    """One probe that finds the store unwell; how long until the next one."""
    assert it.begin_probe(now_s)
    it.end_probe(False, now_s)
    wait_s = it.until_probe_s(now_s)
    assert wait_s is not None
    return wait_s


def test_one_failure_opens_it_and_the_next_ones_are_no_news() -> None:
    it = breaker()
    assert it.failed(0.0)
    assert not it.failed(0.1)
    assert (it.state, it.opened) == (State.OPEN, 1)


def test_it_is_probed_when_the_wait_is_over_and_by_one_at_a_time() -> None:
    it = breaker()
    it.failed(10.0)
    assert not it.begin_probe(10.9)
    assert it.begin_probe(11.0)
    assert not it.begin_probe(99.0)
    it.end_probe(True, 12.0)
    assert it.state is State.CLOSED
    assert it.until_probe_s(12.0) is None


def test_waits_double_up_to_a_bound() -> None:
    it = breaker()
    it.failed(0.0)
    assert [probe_in_vain(it, 100.0 * n) for n in range(1, 6)] == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_only_a_call_that_succeeds_makes_the_waits_short_again() -> None:
    """A master that answers and does nothing else is not asked twice a second for ever."""
    it = breaker()
    for n in range(3):
        it.failed(100.0 * n)
        assert it.begin_probe(100.0 * n + 50)
        it.end_probe(True, 100.0 * n + 50)
    it.failed(1000.0)
    assert it.until_probe_s(1000.0) == 8.0
    it.begin_probe(1010.0)
    it.end_probe(True, 1010.0)
    it.succeeded()
    it.failed(1020.0)
    assert it.until_probe_s(1020.0) == 1.0


def test_servers_that_lost_their_store_together_come_back_one_by_one() -> None:
    waits = []
    for number in range(5):
        it = breaker(jitter=number / 5)
        it.failed(0.0)
        waits.append(it.until_probe_s(0.0))
    assert waits == [1.0, 1.1, 1.2, 1.3, 1.4]


def test_a_probe_that_never_began_cannot_end() -> None:
    with pytest.raises(ValueError, match="did not begin"):
        breaker().end_probe(True, 0.0)


@given(attempt=st.integers(1, 100_000), jitter=st.floats(0, 1))
def test_no_wait_is_longer_than_the_bound_and_its_spread(attempt: int, jitter: float) -> None:
    assert BACKOFF.first_s <= BACKOFF.wait_s(attempt, jitter) <= BACKOFF.most_s * 1.5


class BreakerHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.it = breaker(0.5)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def a_call_succeeds(self) -> None:
        before = self.it.state
        self.it.succeeded()
        assert self.it.state is before

    @rule()
    def a_call_fails(self) -> None:
        was_closed = self.it.state is State.CLOSED
        assert self.it.failed(self.now_s) == was_closed
        assert self.it.state is not State.CLOSED

    @precondition(lambda self: self.it.state is State.OPEN)
    @rule()
    def a_probe_is_due_in_bounded_time(self) -> None:
        wait_s = self.it.until_probe_s(self.now_s)
        assert wait_s is not None
        assert wait_s <= BACKOFF.most_s * 1.5
        assert self.it.begin_probe(self.now_s + wait_s + 1e-6)

    @precondition(lambda self: self.it.state is State.HALF_OPEN)
    @rule(is_well=st.booleans())
    def a_probe_ends(self, is_well: bool) -> None:
        self.it.end_probe(is_well, self.now_s)
        assert (self.it.state is State.CLOSED) == is_well

    @invariant()
    def a_probe_is_due_exactly_when_it_is_open(self) -> None:
        assert (self.it.until_probe_s(self.now_s) is not None) == (self.it.state is State.OPEN)


TestBreakerHistory = BreakerHistory.TestCase


def pause() -> Pause:
    return Pause(BACKOFF, lambda: 0.0)


def test_a_store_that_took_nothing_is_left_alone_and_then_tried_by_one() -> None:
    it = pause()
    assert it.begin_put(0.0)
    assert it.end_put(stored=0, refused=3, now_s=0.0)
    assert not it.begin_put(0.9)
    assert it.begin_put(1.0)
    assert not it.begin_put(1.0)
    assert not it.end_put(stored=0, refused=1, now_s=1.5)
    assert not it.begin_put(3.4)
    assert it.begin_put(3.5)
    assert it.paused == 1


def test_room_for_one_object_ends_the_pause() -> None:
    it = pause()
    it.end_put(stored=0, refused=3, now_s=0.0)
    assert it.begin_put(1.0)
    assert it.end_put(stored=1, refused=2, now_s=1.0)
    assert not it.is_on
    assert it.begin_put(1.0)


def test_a_store_that_takes_some_is_not_full() -> None:
    it = pause()
    assert not it.end_put(stored=1, refused=5, now_s=0.0)
    assert it.begin_put(0.0)


def test_a_try_that_taught_nothing_lets_the_next_one_try() -> None:
    """It was there already, or the store became unwell meanwhile."""
    it = pause()
    it.end_put(stored=0, refused=1, now_s=0.0)
    assert it.begin_put(1.0)
    assert not it.end_put(stored=0, refused=0, now_s=1.2)
    assert it.is_on
    assert it.begin_put(1.2)
