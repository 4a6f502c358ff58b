"""Random histories over a store that goes wrong: equal outputs, no wrong byte, nothing left.

The audit checks every byte that is read, kept or stored, every output against a run without a
store, and that nothing is left in the end. Here each fault is met on each verb, and every pending
answer has to come before the request's deadline.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from moonstep.audit import driver
from moonstep.audit.connectors.moonstep import FaultyStores, settings, store_settings
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive, Event, Generator
from moonstep.audit.shape import Shape, random_shape
from moonstep.engine import Request
from moonstep.scheduler.jobs import JobLedger
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from moonstep.scheduler.tier import StoreTier
from moonstep.stores.faulty import Fault
from moonstep.wire import SCRATCH, SLOT, StepPlan
from tests.store_tier.mutants import without_quarantine

VERBS = (("put",), ("get",), ("contains",), ("put", "get", "contains"))
STEPS = 30
LONG_STEPS = 120
MOST_STEPS_TO_THE_END = 3000


class Watch:
    """The tiers that histories made; notes arrivals and refuses a pending answer that is late."""

    def __init__(self) -> None:
        self.tiers: list[StoreTier] = []
        self._arrived_s: dict[tuple[int, str], float] = {}

    def arrived(self, tier: StoreTier, request: Request) -> None:
        if tier not in self.tiers:
            self.tiers.append(tier)
        ARRIVED(tier, request)
        self._arrived_s[id(tier), request.request_id] = tier._clock()

    def is_pending(self, tier: StoreTier, request: Request) -> bool:
        asked_s = tier._clock()
        answer = IS_PENDING(tier, request)
        if answer:
            waited_s = asked_s - self._arrived_s[id(tier), request.request_id]
            assert waited_s <= tier._settings.fetch_deadline_s, "pending after its deadline"
        return answer

    def build(self, half: MooncakeStoreScheduler, output: Any) -> StepPlan:
        """No step writes a slot that a job owns, or reads one that a job may write."""
        plan = BUILD(half, output)
        if isinstance(half.tier, StoreTier):
            written, read = (set(rows[:, SLOT].tolist()) for rows in (plan.captures, plan.restores))
            fetching, pushing = slots_of(half.tier._fetch_jobs), slots_of(half.tier._push_jobs)
            assert not written & (fetching | pushing), "a capture into a slot that a job owns"
            assert not read & fetching, "a restore from a slot that a job may write"
            assert not fetching & pushing, "a slot with two owners"
        return plan

    @property
    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for tier in self.tiers:
            for part in (tier.pushes.counts, tier.fetches.counts):
                counts.update({name: getattr(part, name) for name in part.__dataclass_fields__})
        return counts


def slots_of(jobs: JobLedger[Any]) -> set[int]:
    """The slots that open jobs own."""
    objects = (each for entry in jobs._open.values() for each in entry.job.objects)
    return {slot for each in objects for slot in each.slots if slot != SCRATCH}


ARRIVED, IS_PENDING = StoreTier.arrived, StoreTier.is_pending
BUILD = MooncakeStoreScheduler.build_connector_meta


def watch_build(watch: Watch) -> Callable[..., StepPlan]:
    return lambda half, output: watch.build(half, output)


@contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    with (
        patch.object(StoreTier, "arrived", lambda *args: watch.arrived(*args)),
        patch.object(StoreTier, "is_pending", lambda *args: watch.is_pending(*args)),
        patch.object(MooncakeStoreScheduler, "build_connector_meta", watch_build(watch)),
    ):
        yield watch


def over_a_store(shape: Shape, rng: random.Random) -> ConnectorChoice:
    """Moonstep with a small host cache, a store, and deadlines of some steps."""
    facts: dict[str, Any] = settings(shape, rng) | store_settings(shape)
    facts |= {
        "host_cache": block_bytes(shape) * rng.choice((6, shape.blocks // 2, shape.blocks)),
        "chunk_tokens": shape.block_tokens * rng.choice((1, 2, 4)),
        "capture": "eager",
        "push": rng.choice(("all", "all", "reuse")),
        "fetch_deadline_s": rng.choice((0.0, 0.003, 0.05)),
        "push_deadline_s": rng.choice((0.003, 0.05)),
        "max_pending": rng.choice((0, 1, 8, 8)),
        "fetch_share": rng.choice((0.4, 1.0)),
        "max_busy_share": rng.choice((0.5, 1.0)),
        "store_threads": rng.choice((2, 4)),
    }
    return ConnectorChoice("MoonstepConnector", facts)


def events_of(shape: Shape, rng: random.Random, steps: int) -> list[Event]:
    """A random history without faults and sessions; those come from elsewhere."""
    events: list[Event] = []
    for event in Generator(shape, rng).events(steps):
        match event:
            case Arrive():
                events.append(replace(event, streaming=False))
            case _ if type(event).__name__ in ("Step", "Abort", "Reset"):
                events.append(event)
    return events


def history(
    stores: FaultyStores,
    seed: int,
    fault: Fault,
    verbs: tuple[str, ...],
    comes_back: bool,
    steps: int = STEPS,
) -> driver.Outcome:
    """A third of the events in good weather, then the fault; what hangs goes on in between, or at
    the very end, when every request has ended without it."""
    rng = random.Random(seed)
    shape = random_shape(rng)
    events = events_of(shape, rng, steps)

    def body(engine: Engine) -> None:
        for number, event in enumerate(events):
            if number == len(events) // 3:
                stores.inject(fault.value, verbs)
            if comes_back and number and number % 7 == 0:
                for store in stores.opened:
                    store.resume()
            engine.apply(event)
        for _ in range(MOST_STEPS_TO_THE_END):
            if not engine.scheduler.requests:
                return
            engine.step()
        raise AssertionError("requests wait for a store that is in trouble")

    return driver.run(shape, over_a_store(shape, rng), body)


@pytest.mark.parametrize("fault", sorted(Fault, key=lambda fault: fault.name))
def test_a_store_in_trouble_costs_hits_and_nothing_else(stores: FaultyStores, fault: Fault) -> None:
    with watched() as watch:
        for number, verbs in enumerate(VERBS):
            outcome = history(stores, 100 + number, fault, verbs, bool(number % 2))
            assert outcome.finding is None, f"{fault}, {verbs}: {outcome.finding}"
        assert len(watch.tiers) == len(VERBS)
        for tier in watch.tiers:
            assert tier.quarantined_slots == 0
            assert tier.is_idle
    assert watch.counts["started"] > 5, "hardly anything was pushed"
    assert watch.counts["looks"] > 5, "hardly anything was looked for"


@pytest.mark.parametrize("verbs", [("get",), ("put",)])
def test_a_store_that_hangs_and_comes_back(stores: FaultyStores, verbs: tuple[str, ...]) -> None:
    with watched() as watch:
        for seed in range(200, 210):
            outcome = history(stores, seed, Fault.HANGING, verbs, True, LONG_STEPS)
            assert outcome.finding is None, f"seed {seed}: {outcome.finding}"
            assert not any(tier.quarantined_slots for tier in watch.tiers)
    assert watch.counts["abandoned_jobs"] > 0, "no job was given up"


@pytest.mark.parametrize(("kind", "verb"), [("fetch", "get"), ("push", "put")])
def test_without_quarantine_it_is_found(stores: FaultyStores, kind: str, verb: str) -> None:
    with without_quarantine(kind):
        for seed in range(200, 260):
            outcome = history(stores, seed, Fault.HANGING, (verb,), True, LONG_STEPS)
            if outcome.finding is not None:
                return
    pytest.fail("a tier without quarantine passes the audit")
