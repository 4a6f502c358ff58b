"""A call into a frozen store may read or write its memory when the store wakes up.

Real scheduler, real workers, a store that freezes: a job is abandoned, its slots would be wanted
for something else, and then the store goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moonstep.audit.connectors.moonstep import SHELF, FaultyStores
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice, block_bytes
from moonstep.audit.findings import Kind, Stop
from moonstep.audit.history import Arrive
from moonstep.audit.shape import Shape
from moonstep.scheduler.tier import StoreTier
from moonstep.stores import memory
from moonstep.stores.header import HEADER_BYTES
from tests.store_tier.mutants import without_quarantine

SHAPE = Shape(blocks=24, block_tokens=4, max_tokens=32)
BLOCKS = 4
PROMPT_TOKENS = BLOCKS * SHAPE.block_tokens
SOON_S = 20.0


class Stage:
    """An engine with a host cache of few slots and a store behind it."""

    def __init__(self, engine: Engine, stores: FaultyStores) -> None:
        self.engine = engine
        self.stores = stores

    @property
    def tier(self) -> StoreTier:
        tier = self.engine.scheduler.connector.scheduler.tier
        assert isinstance(tier, StoreTier)
        return tier

    def run(self, name: str, family: int) -> None:
        """One prompt of four blocks and one token, up to its end."""
        self.engine.apply(Arrive(name, family, PROMPT_TOKENS + 1, PROMPT_TOKENS + 1))
        while name in self.engine.scheduler.requests:
            self.engine.step()
        self.steps(3)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.empty_step()

    def until(self, what: Any) -> None:
        stop_s = time.monotonic() + SOON_S
        while not what():
            assert time.monotonic() < stop_s
            self.steps(1)

    def wait_until_hanging(self) -> None:
        self.until(lambda: any(store.hanging for store in self.stores.opened))

    def wait_until_abandoned(self) -> None:
        """With quarantine slots stay owned; without it, jobs are no longer known of."""
        self.until(lambda: not (self.tier._push_jobs.awaited or self.tier._fetch_jobs.awaited))

    def resume(self) -> None:
        self.stores.clear()
        self.until(lambda: not any(store.hanging for store in self.stores.opened))
        workers = [rank.connector.worker for rank in self.engine.ranks]
        self.until(lambda: not any(worker.jobs._open for worker in workers))
        self.steps(3)

    def forget_locally(self) -> None:
        """Engine and host cache are full of other things."""
        for family in range(90, 93):
            self.run(f"other{family}", family)
        assert self.engine.scheduler.reset_prefix_cache()

    def wrong_objects(self) -> int:
        """Objects whose bytes are not those of their key, whatever their header says."""
        wrong = 0
        shelf, rank = memory._shelves[SHELF], self.engine.ranks[0]
        for entry in shelf.entries():
            stored = shelf.read(entry.key, touch=False)
            assert stored is not None
            name = bytes.fromhex(entry.key.rpartition("/")[2])
            states = self.engine.clients.registry.states(name, SHAPE.block_tokens)
            assert states is not None
            wrong += rank.memory.block_bytes(0, states) != stored[HEADER_BYTES:]
        return wrong


@contextmanager
def open_stage(stores: FaultyStores, slots: int, **settings: Any) -> Iterator[Stage]:
    facts: dict[str, Any] = {
        "host_cache": slots * block_bytes(SHAPE),
        "capture": "eager",
        "store": f"memory://{SHELF}",
        "chunk_tokens": SHAPE.block_tokens,
        "min_fetch_tokens": 1,
        "fetch_share": 1.0,
        "max_busy_share": 1.0,
        "push_deadline_s": SOON_S,
        "fetch_deadline_s": SOON_S,
        **settings,
    }
    engine = Engine(SHAPE, ConnectorChoice("MoonstepConnector", facts))
    try:
        engine.empty_step()
        yield Stage(engine, stores)
        engine.drain()
    finally:
        stores.clear()
        engine.shutdown()
        engine.threads.close()


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
    """Jobs behind the frozen one are sealed when it goes on: whole objects, of another prefix."""
    with (
        pytest.raises(Stop) as caught,
        without_quarantine("push"),
        open_stage(stores, slots=BLOCKS + 2, push_deadline_s=0.0) as stage,
    ):
        a_frozen_put(stage)
    assert caught.value.finding.kind is Kind.WRONG_KEPT


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
