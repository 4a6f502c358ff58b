"""Resets in the real scheduler: nothing from before one is ever served after it.

A reset of both caches stands for new weights: from then on the oracle expects other bytes, so a
single old byte that comes back is found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from moonstep.audit.history import Arrive, Reset, Step
from moonstep.audit.shape import Shape
from moonstep.config import CaptureMode
from tests.scheduler.engine import Watched, open_engine
from tests.scheduler.stock import Hand, captured, make_request, running

RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])
CAPTURE = pytest.mark.parametrize("capture", ["eager", "lazy"])
SHAPE = Shape(blocks=40, max_tokens=64, budget_tokens=96)
LAGGING = replace(SHAPE, asynchronous=True, lag=True, executor="multi-process", ranks=2)
PROMPT: dict[str, Any] = {"family": 1, "tokens": 30, "shared": 30}
BOTH = Reset(connector=True)


@RUNNERS
@CAPTURE
def test_an_idle_reset_forgets_everything(runner: Literal["v1", "v2"], capture: str) -> None:
    with open_engine(replace(SHAPE, runner=runner), capture=capture) as watched:
        watched.run(id="a", **PROMPT)
        watched.apply(BOTH)
        assert watched.engine.epoch == 1
        assert watched.half.index.written_count == 0
        assert watched.run(id="again", **PROMPT) == 0
        watched.apply(Reset())
        assert watched.run(id="b", **PROMPT) == (28 if capture == "eager" else 0)


@RUNNERS
@CAPTURE
def test_a_reset_of_running_requests_serves_nothing_old_in_the_step_that_has_them_back(
    runner: Literal["v1", "v2"], capture: str
) -> None:
    with open_engine(replace(SHAPE, runner=runner), capture=capture) as watched:
        watched.apply(Arrive("a", **PROMPT, output=20), Arrive("b", 2, 20, 20, output=20), Step(6))
        watched.apply(Reset(running=True, connector=True), Step())
        assert watched.engine.epoch == 1
        assert watched.last.preempted_req_ids == {"a", "b"}
        assert set(watched.last.num_scheduled_tokens) == {"a", "b"}
        assert watched.half.stats.restored_tokens == 0
        watched.settle()
        watched.apply(Reset())
        if capture == "eager":  # what was computed after the reset is kept
            assert watched.run(id="again", **PROMPT) == 28


@CAPTURE
def test_a_reset_with_captures_under_way(capture: str) -> None:
    """Planned, not yet reported; on the way while the reset comes, reported afterwards."""
    with open_engine(LAGGING, capture=capture) as watched:
        under_way = 0
        for index in range(5):
            watched.apply(Arrive(f"r{index}", index, 30, 30, output=6), Step(1))
            watched.apply(Reset(running=False, connector=True))
            under_way += watched.half.index.planned_count
            assert watched.half.index.written_count == 0
            watched.apply(Step(2))
        watched.settle()
        assert under_way > 0 or capture == "lazy"
        assert watched.half.index.planned_count == 0
        watched.apply(Reset())
        for index in range(5):
            watched.run(id=f"again{index}", family=index, tokens=30, shared=30)


def test_captures_under_way_at_a_reset_are_let_go_when_they_are_reported() -> None:
    hand = Hand()
    hand.admit(make_request("r", 64), [1, 2, 3, 4])
    assert captured(hand.step({"r": 64}, new=["r"])) == [1, 2, 3, 4]
    hand.half.reset_cache()
    assert hand.half.index.planned_count == 4
    assert hand.half.get_num_new_matched_tokens(make_request("s", 64), 0)[0] == 0
    hand.report()
    assert hand.half.index.planned_count == hand.half.index.written_count == 0
    assert hand.half.index.free_count == hand.slots
    assert hand.half.stats.saved_blocks == 0


@pytest.mark.parametrize("capture", list(CaptureMode))
def test_what_a_running_request_computed_before_a_reset_is_not_kept_later(
    capture: CaptureMode,
) -> None:
    """Neither what it fills afterwards: that depends on what came before it."""
    hand = Hand(capture=capture, blocks=12)
    running(hand, 64, [1, 2, 3, 4])
    hand.half.reset_cache()
    plans = hand.decode("r", 20)
    hand.preempt("r")
    plans += [hand.step(preempted=["r"]), hand.step(), hand.step()]
    assert captured(*plans) == []
    assert hand.half.index.written_count == 0


def test_the_engines_own_copies_from_before_a_reset_are_not_kept() -> None:
    """The connector was reset, the engine's cache was not: a new life goes on from old blocks."""
    hand = Hand()
    running(hand, 64, [1, 2, 3, 4])
    hand.half.reset_cache()
    hand.step(finished=["r"])
    hand.admit(make_request("s", 96), [1, 2, 3, 4, 5, 6], local=64)
    plans = [hand.step({"s": 32}, new=["s"])]
    hand.preempt("s")
    plans.append(hand.step(preempted=["s"]))
    assert not {1, 2, 3, 4} & set(captured(*plans))


@RUNNERS
def test_a_request_that_does_not_fit_is_asked_again_and_restored_when_it_does(
    runner: Literal["v1", "v2"],
) -> None:
    """Its answer comes to nothing step after step, while the engine gives its blocks to others."""
    shape = Shape(runner=runner, blocks=18, max_tokens=64, seats=4)
    with open_engine(shape) as watched:
        watched.run(id="seed", **PROMPT)
        watched.apply(Reset())
        watched.apply(Arrive("long", 2, 40, 40, output=20), Step(3))
        before = watched.engine.seam.counts.lookups
        watched.apply(Arrive("waits", **PROMPT, output=4), Step(8))
        assert_waits(watched, before)
        watched.settle()
        assert watched.engine.clients.by_id["waits"].received == 4
        assert watched.half.stats.restored_tokens == 28


def assert_waits(watched: Watched, lookups_before: int) -> None:
    assert "waits" not in watched.half.lives
    assert watched.engine.seam.counts.lookups - lookups_before == 8
