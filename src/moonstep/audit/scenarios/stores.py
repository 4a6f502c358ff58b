"""Stores: what a connector does when the store behind it is slow, full, wrong or gone.

These apply to connectors whose kit puts a store that obeys under them (`Kit.store`).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moonstep.audit import connectors
from moonstep.audit.scenarios.stage import DoesNotApply, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moonstep.audit.scenarios.stage import Stage


STRUCK_S = 2.0
"""How long a thread of the connector may take to come to its call."""


@contextmanager
def fault(stage: Stage, kind: str, verbs: str = "put,get,contains") -> Iterator[None]:
    """The store under the connector is faulty until the `with` ends."""
    store = connectors.store_of(stage.engine.scheduler.connector)
    if store is None:
        raise DoesNotApply("there is no store that can be told to fail")
    if not store.inject(kind, verbs.split(",")):
        raise DoesNotApply(f"the store cannot be told to be {kind}")
    struck = store.struck
    try:
        yield
        deadline = time.monotonic() + STRUCK_S
        while store.struck == struck and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        store.clear()
    stage.exercised(store.struck > struck, f"no call of the store while it was {kind}")


def preempt_with_puts_waiting(stage: Stage) -> None:
    """Puts hang; R is preempted, S fills R's old blocks; then the puts go on: they must be R's."""
    with fault(stage, "hanging", "put"):
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


def ask_while_faulty(kind: str, verbs: str = "put,get,contains") -> Callable[[Stage], None]:
    """What was stored is asked for while the store is faulty, and again when it is well."""

    def body(stage: Stage) -> None:
        for family in range(3):
            stage.warm(112, family=family)
        with fault(stage, kind, verbs):
            for family in range(3):
                stage.arrive(f"f{family}", 112, family=family, output=4)
                stage.arrive(f"other{family}", 40, family=9 + family, output=4)
                stage.settle()
        stage.forget()
        for family in range(3):
            stage.arrive(f"again{family}", 112, family=family, output=2)
            stage.settle()

    return body


SCENARIOS = (
    Scenario(
        "puts-waiting",
        "preempted and overwritten while puts hang",
        preempt_with_puts_waiting,
        case="2",
    ),
    Scenario(
        "gets-fail", "objects found and not fetched", ask_while_faulty("failing", "get"), case="12"
    ),
    Scenario("gets-raise", "gets raise", ask_while_faulty("unwell", "get"), case="12"),
    Scenario("gets-hang", "gets hang, and come back later", ask_while_faulty("hanging", "get")),
    Scenario(
        "gets-short", "half of each object arrives", ask_while_faulty("short", "get"), case="13"
    ),
    Scenario("gets-lie", "success, and not a byte", ask_while_faulty("lying"), case="13"),
    Scenario("gets-flip", "a bit of each object is wrong", ask_while_faulty("flipping bits")),
    Scenario("too-few-answers", "lists that are too short", ask_while_faulty("too few answers")),
    Scenario(
        "evicted-between",
        "objects gone between lookup and get",
        ask_while_faulty("vanishing", "get"),
    ),
    Scenario("store-full", "every put refused", ask_while_faulty("full"), case="13"),
    Scenario(
        "store-raises", "every call of the store raises", ask_while_faulty("unwell"), case="13"
    ),
    Scenario(
        "store-hangs", "every call of the store hangs", ask_while_faulty("hanging"), case="13"
    ),
)
