"""Why tokens were computed: what came of the look for a prefix, told when it is admitted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonstep.scheduler.misses import NOTHING_FOUND, Look, MissReason, missed, overruled
from moonstep.scheduler.pace import FETCHES_REMEMBERED, PROBE_EVERY
from moonstep.scheduler.tracker import LoadSpec
from tests.scheduler.stock import make_request
from tests.store_tier.rig import Rig

FOUR = 65
"""Tokens of a prompt of four blocks: two objects."""


@given(
    st.integers(1, 200),
    st.integers(0, 12),
    st.integers(0, 300),
    st.sampled_from(list(MissReason)),
)
def test_every_token_that_nobody_had_is_missed_once(
    num_tokens: int, had_blocks: int, known_tokens: int, reason: MissReason
) -> None:
    had_tokens = min(had_blocks * 16, num_tokens)
    parts = list(missed(num_tokens, had_tokens, 16, Look(0, known_tokens, reason)))
    assert all(tokens >= 0 for _, tokens in parts)
    assert sum(tokens for _, tokens in parts) == num_tokens - had_tokens
    (_, tail) = parts[-1]
    assert tail <= 16


def look(rig: Rig, request: Any) -> tuple[int, int, str]:
    """What is told when the request is admitted; once."""
    told = rig.tier.admitted(request.request_id)
    assert rig.tier.admitted(request.request_id) == NOTHING_FOUND
    return told.fetched_tokens, told.known_tokens, told.reason.value


def test_what_came_in_time() -> None:
    rig, request = Rig(), make_request("r", FOUR)
    (job,) = rig.find(request)
    rig.end(job)
    fetched, known, _ = look(rig, request)
    assert (fetched, known) == (64, 64)


@pytest.mark.parametrize("how_far", ["not answered", "on its way", "half of it came"])
def test_what_was_late(how_far: str) -> None:
    rig, request = Rig(fetch_deadline_s=2.0), make_request("r", 18 * 16 + 1)
    if how_far == "not answered":
        rig.arrive(request)
    else:
        first, *_ = rig.find(request)
        if how_far == "half of it came":
            rig.end(first)
    rig.clock.now_s += 2.0
    rig.plan()
    came = 128 if how_far == "half of it came" else 0
    assert look(rig, request) == (came, 288, "late")


def test_what_the_store_does_not_have_is_absent() -> None:
    rig, request = Rig(), make_request("r", FOUR)
    rig.find(request, [True, False])
    rig2, nothing = Rig(), make_request("r", FOUR)
    rig2.find(nothing, False)
    assert look(rig, request)[1] == 32
    assert look(rig2, nothing) == (0, 0, "absent")


def test_what_is_too_short_to_be_fetched_or_looked_for() -> None:
    rig, found = Rig(min_fetch_tokens=64), make_request("r", FOUR)
    rig.find(found, [True, False])
    assert look(rig, found) == (0, 32, "short")
    little = make_request("s", 33, family=2)
    rig.arrive(little)
    assert not rig.looks.asked
    assert look(rig, little) == (0, 32, "short")


def test_what_failed_and_is_not_asked_for_again() -> None:
    rig, request = Rig(), make_request("r", FOUR)
    (job,) = rig.find(request)
    rig.end(job, [True, False])
    assert look(rig, request) == (32, 64, "failed")
    rig.index.reset()
    rig.arrive(request)
    assert look(rig, request) == (0, 64, "failed")


def test_what_had_no_room() -> None:
    rig, request = Rig(slots=16, object_blocks=8, fetch_share=0.25), make_request("r", 129)
    rig.find(request)
    assert look(rig, request) == (0, 128, "busy")
    crowded = Rig(max_pending=0)
    crowded.find(request)
    assert not crowded.tier.is_pending(request)
    assert look(crowded, request) == (0, 128, "busy")


def slow_rig() -> Rig:
    """A store of which nothing has come in time as often as it takes, and a fast engine."""
    rig = Rig(fetch_deadline_s=2.0)
    for _ in range(4):
        rig.tier.saw(prefill_step())
        rig.clock.now_s += 0.1
    for at in range(FETCHES_REMEMBERED):
        request = make_request(f"slow{at}", FOUR, family=10 + at)
        (job,) = rig.find(request)
        rig.clock.now_s += 2.0
        rig.plan()
        rig.tier.finished(request)
        rig.end(job)
    return rig


def prefill_step() -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={"r": 1000},
        total_num_scheduled_tokens=1000,
        scheduled_cached_reqs=SimpleNamespace(req_ids=["r"]),
    )


def test_what_would_be_slower_than_computing_it_is_not_fetched_until_it_is_faster() -> None:
    rig = slow_rig()
    fetched = 0
    for at in range(3 * PROBE_EVERY):
        request = make_request(f"r{at}", FOUR, family=100 + at)
        for job in rig.find(request):
            fetched += 1
            rig.end(job)  # at once
        if not fetched:
            assert not rig.tier.is_pending(request)
            assert look(rig, request) == (0, 64, "slower")
        rig.tier.finished(request)
    assert fetched == 2 + PROBE_EVERY, "two probes, and then all"


def test_what_failed_is_no_measurement() -> None:
    rig = slow_rig()
    pace = rig.tier._pace
    before = [list(sizes.token_s) for sizes in pace._by_size.values()]
    for at in range(2 * PROBE_EVERY):
        request = make_request(f"r{at}", FOUR, family=100 + at)
        for job in rig.find(request):
            rig.end(job, False)
        rig.tier.finished(request)
    assert [list(sizes.token_s) for sizes in pace._by_size.values()] == before


def test_the_request_and_the_engine_have_the_last_word() -> None:
    request = make_request("r", FOUR)
    found = Look(16, 48, MissReason.LATE)
    assert overruled(found, request, LoadSpec(0, 64, found_tokens=64), 64) == found
    assert overruled(found, request, None, 0) == found
    less = overruled(found, request, LoadSpec(0, 64, found_tokens=64), 32)
    assert less == Look(16, 64, MissReason.DECLINED)
    short = overruled(NOTHING_FOUND, request, LoadSpec(16, 0, found_tokens=32), 0)
    assert short == Look(0, 48, MissReason.SHORT)
    request.skip_reading_prefix_cache = True
    assert overruled(found, request, None, 0) == Look(0, FOUR, MissReason.NOT_ASKED)
