"""A call into a frozen store may read or write its memory when the store wakes up.

Real scheduler, real workers, a store that freezes: a job is abandoned, its slots would be wanted
for something else, and then the store goes on.
"""

from __future__ import annotations

import pytest

from moonstep.audit.connectors.moonstep import SHELF, FaultyStores
from moonstep.audit.findings import Kind, Stop
from moonstep.stores import memory
from tests.store_tier.mutants import without_quarantine
from tests.store_tier.stage import BLOCKS, Stage, open_stage


def a_frozen_put(stage: Stage) -> int:
    """A's blocks are being pushed when the store freezes; B is computed; the store goes on."""
    stage.stores.inject("hanging", ["put"])
    stage.run("a", family=1)
    stage.wait_until_hanging()
    stage.wait_until_abandoned()
    stage.run("b", family=2)
    stage.run("c", family=3)
    stage.resume()
    return stage.wrong_objects()


def test_what_a_frozen_put_stores_is_still_what_its_key_says(stores: FaultyStores) -> None:
    with open_stage(stores, slots=BLOCKS + 2, push_deadline_s=0.0) as stage:
        assert a_frozen_put(stage) == 0
        assert memory._shelves[SHELF].usage().objects >= BLOCKS, "nothing was stored"
        assert stage.tier.quarantined_slots == 0


def test_without_quarantine_a_frozen_put_stores_another_prefix(stores: FaultyStores) -> None:
    """Under a header that does not fit it; or, from a job behind the frozen one, under one that
    does: then the audit stops at once."""
    found = 0
    try:
        with (
            without_quarantine("push"),
            open_stage(stores, slots=BLOCKS + 2, push_deadline_s=0.0) as stage,
        ):
            found = a_frozen_put(stage)
    except Stop as stop:
        assert stop.finding.kind is Kind.WRONG_KEPT  # noqa: PT017
        found = 1
    assert found > 0


def a_frozen_get(stage: Stage) -> None:
    """A's blocks are being fetched when the store freezes; B is computed; the store goes on."""
    stage.run("a", family=1)
    stage.until(lambda: stage.tier.pushes.counts.stored >= BLOCKS)
    stage.forget_locally()
    stage.until(lambda: stage.tier.is_idle)
    stage.stores.inject("hanging", ["get"])
    stage.run("a2", family=1)
    assert stage.tier.fetches.counts.started_objects
    stage.wait_until_abandoned()
    stage.run("b", family=2)
    stage.run("c", family=3)
    stage.resume()
    stage.steps(20)


def test_what_a_frozen_get_brings_lands_in_no_slot_of_others(stores: FaultyStores) -> None:
    with open_stage(stores, slots=BLOCKS + 2, fetch_deadline_s=0.05) as stage:
        a_frozen_get(stage)
        assert stage.tier.fetches.counts.abandoned_jobs
        assert stage.tier.quarantined_slots == 0
        assert stage.wrong_objects() == 0


def test_without_quarantine_a_frozen_get_overwrites_another_prefix(stores: FaultyStores) -> None:
    with (
        pytest.raises(Stop) as caught,
        without_quarantine("fetch"),
        open_stage(stores, slots=BLOCKS + 2, fetch_deadline_s=0.05) as stage,
    ):
        a_frozen_get(stage)
    assert caught.value.finding.kind in (Kind.WRONG_KEPT, Kind.BOOKS)
