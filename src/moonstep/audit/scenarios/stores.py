"""Stores: what a connector does when the store behind it is slow, full, wrong or gone.

These apply to connectors whose kit puts a store that obeys under them (`Kit.store`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonstep.audit import connectors
from moonstep.audit.scenarios.stage import DoesNotApply, Scenario

if TYPE_CHECKING:
    from moonstep.audit.connectors import StoreControl
    from moonstep.audit.scenarios.stage import Stage


def _store(stage: Stage) -> StoreControl:
    control = connectors.store_of(stage.engine.scheduler.connector)
    if control is None:
        raise DoesNotApply("there is no store that can be told to fail")
    return control


def preempt_with_puts_waiting(stage: Stage) -> None:
    """Puts hang; R is preempted, S fills R's old blocks; then the puts go on: they must be R's."""
    store = _store(stage)
    with store.held("put"):
        stage.arrive("R", 64, family=1, output=20)
        stage.step(3)
        stage.reset(running=True)
        for index in range(4):
            stage.arrive(f"S{index}", 64, family=3 + index, output=4)
        stage.step(12)
    stage.settle()
    stage.forget()
    stage.arrive("again", 64, family=1)
    stage.settle()


def failing_gets(stage: Stage) -> None:
    """What a lookup found cannot be fetched: the first, middle, last, all; or an exception."""
    store = _store(stage)
    for family, which in enumerate(("first", "middle", "last", "all", "raise")):
        stage.warm(112, family=family)
        with store.failing_gets(which):
            stage.arrive(f"g{which}", 112, family=family, output=4)
            stage.arrive(f"h{which}", 40, family=9, output=4)
            stage.settle()
        stage.forget()


def full_store(stage: Stage) -> None:
    """The store refuses every put."""
    store = _store(stage)
    with store.full():
        for family in range(3):
            stage.arrive(f"f{family}", 80, family=family, output=4)
            stage.settle()
    stage.forget()
    stage.arrive("again", 80, family=0)
    stage.settle()


def evicted_between(stage: Stage) -> None:
    """Objects leave the store after the lookup has counted them."""
    store = _store(stage)
    for family in range(3):
        stage.warm(96, family=family)
        with store.evicting_before_get():
            stage.arrive(f"e{family}", 96, family=family, output=3)
            stage.settle()
        stage.forget()


def raising_calls(stage: Stage) -> None:
    """Every call of the store raises for a while."""
    store = _store(stage)
    stage.warm(96)
    with store.raising():
        for family in range(3):
            stage.arrive(f"r{family}", 96, family=family + 1, output=4)
            stage.settle()
    stage.arrive("again", 96)
    stage.settle()


SCENARIOS = (
    Scenario(
        "puts-waiting",
        "preempted and overwritten while puts hang",
        preempt_with_puts_waiting,
        case="2",
    ),
    Scenario("gets-fail", "objects found and not fetched", failing_gets, case="12"),
    Scenario("store-full", "every put refused", full_store, case="13"),
    Scenario("evicted-between", "objects gone between lookup and get", evicted_between),
    Scenario("store-raises", "every call of the store raises", raising_calls, case="13"),
)
