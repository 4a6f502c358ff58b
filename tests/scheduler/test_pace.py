"""When a fetch pays: no going back and forth under steady rates, and no shutting out for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonstep.scheduler.pace import (
    CLEARLY_SLOWER,
    FAST_PROBES,
    FETCHES_REMEMBERED,
    PROBE_EVERY,
    FetchPace,
    PrefillPace,
    is_slower,
)

PREFILL_S = 1e-4
TOKENS = 1024


def step(scheduled: dict[str, int], goes_on: bool = True) -> Any:
    """A step as vLLM describes it."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_cached_reqs=SimpleNamespace(req_ids=["r"] if goes_on else []),
    )


class Store:
    """A pace, a clock, and a store that takes so many seconds a token."""

    def __init__(self, token_s: float = PREFILL_S) -> None:
        self.now_s, self.token_s = 50.0, token_s
        self.pace = FetchPace(lambda: self.now_s)
        for _ in range(5):
            self.pace.prefill.saw(step({"r": 1000}), self.now_s)
            self.now_s += 999 * PREFILL_S

    def find(self, tokens: int = TOKENS, scatter: float = 1.0) -> bool:
        """The store has so many tokens; whether they were fetched."""
        should = self.pace.should_fetch(tokens)
        if should:
            started_s = self.now_s
            self.now_s += tokens * self.token_s * scatter
            self.pace.fetched(tokens, tokens, started_s)
        return should


def test_what_is_measured_of_prefills() -> None:
    prefill = PrefillPace()
    assert prefill.token_s is None
    for now_s in (0.0, 1.0, 2.0, 3.0):
        assert prefill.token_s is None
        prefill.saw(step({"r": 101}), now_s)
    assert prefill.token_s == 0.01
    # Steps that decode only, and the rest after a step whose requests have all ended, say nothing.
    for now_s in (3.001, 3.002):
        prefill.saw(step(dict.fromkeys(map(str, range(200)), 1)), now_s)
    prefill.saw(step({"r": 101}), 3.003)
    prefill.saw(step({"s": 101}, goes_on=False), 900.0)
    assert abs((prefill.token_s or 0) - 0.01) < 1e-6


def test_drafts_are_no_prompt_tokens() -> None:
    prefill = PrefillPace(tokens_per_decode=4)
    for now_s in range(9):
        prefill.saw(step(dict.fromkeys(map(str, range(99)), 4)), float(now_s))
    assert prefill.token_s is None


def test_a_step_that_is_built_ahead_is_timed_when_it_runs() -> None:
    """Async scheduling: prefills of 1 s between decodes, each built while the last one runs."""
    prefill, now_s = PrefillPace(lag=1), 0.0
    for _ in range(4):
        for scheduled, runs_s in (({"r": 1}, 0.01), ({"r": 101}, 0.01), ({"r": 1}, 1.0)):
            prefill.saw(step(scheduled), now_s)
            now_s += runs_s
    assert prefill.token_s is not None
    assert abs(prefill.token_s - 0.01) < 1e-6


def test_until_both_are_known_everything_is_fetched() -> None:
    pace = FetchPace(lambda: 1e9)
    for _ in range(100):
        assert pace.should_fetch(TOKENS)
        pace.fetched(TOKENS, 0, 0.0)
    assert not is_slower([9.0] * (FETCHES_REMEMBERED - 1), 1.0, was_slower=False)


@given(
    st.floats(0.05, 20),
    st.lists(st.floats(0.85, 1.15), min_size=200, max_size=200),
)
def test_steady_rates_never_make_it_go_back_and_forth(ratio: float, scatter: list[float]) -> None:
    """Whatever the ratio, and with every fetch off by up to 15 %: it stops once, or never."""
    store = Store(PREFILL_S * ratio)
    fetched = [store.find(scatter=each) for each in scatter]
    passed_by = fetched.count(False)
    if ratio > 1.2 * CLEARLY_SLOWER:
        assert passed_by
    if ratio < 0.8 * CLEARLY_SLOWER:
        assert not passed_by
    if passed_by:
        first = fetched.index(False)
        probes = [at - first for at, each in enumerate(fetched) if each and at >= first]
        assert probes == list(range(PROBE_EVERY - 1, len(fetched) - first, PROBE_EVERY))


@given(st.floats(2, 1000), st.integers(5, 300), st.floats(0.01, 0.9))
def test_a_store_that_is_fast_again_is_found_out(slow: float, finds: int, fast: float) -> None:
    store = Store(PREFILL_S * slow)
    for _ in range(finds):
        store.find()
    store.token_s = PREFILL_S * fast
    patience = PROBE_EVERY * FAST_PROBES + 1
    assert any(store.find() for _ in range(patience)) or finds < FETCHES_REMEMBERED
    for _ in range(patience):
        store.find()
    assert all(store.find() for _ in range(5 * PROBE_EVERY))


def test_sizes_are_judged_by_themselves() -> None:
    store = Store(PREFILL_S * 10)
    for _ in range(FETCHES_REMEMBERED):
        assert store.find(300)
    assert not store.find(400)
    store.token_s = PREFILL_S / 10
    assert store.find(9000)
    assert not store.find(500)


def test_a_fetch_of_which_nothing_came_in_time_is_as_slow_as_can_be() -> None:
    store = Store()
    for _ in range(FETCHES_REMEMBERED):
        assert store.pace.should_fetch(TOKENS)
        store.pace.fetched(TOKENS, 0, store.now_s)
    assert not store.pace.should_fetch(TOKENS)
