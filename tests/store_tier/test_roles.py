"""Random histories in the roles of a producer and of a consumer, byte by byte.

A producer is the role in which the engine frees blocks, and preempts, while a step that writes them
is still under way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from moonstep.audit import driver
from moonstep.audit.connectors.moonstep import FaultyStores, in_role, settings, store_settings
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.history import Generator
from moonstep.audit.shape import random_shape
from moonstep.scheduler.tier import StoreTier

STEPS = 60
SEEDS = range(300, 306)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What all tiers together have pushed and looked for."""
    counts: Counter[str] = Counter()
    report = StoreTier.report

    def counting(tier: StoreTier, *arguments: object) -> None:
        before = tier.pushes.counts.stored
        report(tier, *arguments)  # type: ignore[arg-type]
        counts["stored"] += tier.pushes.counts.stored - before
        counts["looks"] += tier.fetches.counts.looks

    with patch.object(StoreTier, "report", counting):
        yield counts


def history(seed: int, role: str) -> driver.Outcome:
    """One step ahead of its workers every other time; memory is tight, so preemption is common."""
    rng = random.Random(seed)
    shape = replace(random_shape(rng), asynchronous=seed % 2 == 0, lag=False)
    facts = in_role(role, shape, settings(shape, rng) | store_settings(shape))
    events = list(Generator(shape, rng).events(STEPS))

    def body(engine: Engine) -> None:
        for event in events:
            engine.apply(event)

    return driver.run(shape, ConnectorChoice("MoonstepConnector", facts, role), body)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_no_byte_is_wrong_in_any_role(stores: FaultyStores, role: str) -> None:
    with counted() as counts:
        for seed in SEEDS:
            outcome = history(seed, role)
            assert outcome.finding is None, f"seed {seed}: {outcome.finding}"
    assert (counts["looks"] > 0) == (role == "kv_consumer")
    if role == "kv_producer":
        assert counts["stored"] > 0
