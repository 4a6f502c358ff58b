"""Driver: runs one history on one engine and says what came of it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moonstep.audit import quiet
from moonstep.audit.connectors import fitted, kit_for
from moonstep.audit.engine import Engine
from moonstep.audit.findings import Finding, Stop
from moonstep.audit.history import Event, Generator
from moonstep.audit.limits import Limits
from moonstep.audit.shape import Cell, Groups, Shape, random_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonstep.audit.engineconfig import ConnectorChoice

HISTORY_STEPS = 120
"""Engine steps of one random history, before it is drained."""


@dataclass(slots=True)
class Outcome:
    """What one history or scenario came to; `counts` are figures of the engine and the seam."""

    shape: Shape
    finding: Finding | None = None
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return self.counts.get("steps", 0)


def figures(engine: Engine) -> dict[str, int]:
    """All counters of an engine and its seam as one dictionary."""
    counts: dict[str, int] = {}
    for source in (engine.counts, engine.seam.counts):
        for name in source.__dataclass_fields__:
            value = getattr(source, name)
            if isinstance(value, int):
                counts[name] = value
    return counts


def run(
    shape: Shape,
    connector: ConnectorChoice,
    body: Callable[[Engine], None],
    limits: Limits | None = None,
) -> Outcome:
    """Build an engine, let `body` drive it, drain it, shut it down; the first finding ends it."""
    outcome = Outcome(shape)
    started = time.perf_counter()
    engine: Engine | None = None
    quiet.hush()
    kit_for(connector.name).fresh()
    try:
        engine = Engine(shape, connector, limits)
        body(engine)
        engine.drain()
    except Stop as stop:
        outcome.finding = stop.finding
    outcome.finding = _shut_down(engine, outcome.finding)
    if engine is not None:
        outcome.counts = figures(engine)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _shut_down(engine: Engine | None, finding: Finding | None) -> Finding | None:
    if engine is None:
        return finding
    try:
        engine.shutdown()
    except Stop as stop:
        finding = finding or stop.finding
    finally:
        engine.threads.close()
    halves = [engine.scheduler.connector, *(rank.connector for rank in engine.ranks)]
    kit_for(engine.connector_name).retire(halves)
    return finding


def run_events(
    shape: Shape,
    connector: ConnectorChoice,
    events: Sequence[Event],
    limits: Limits | None = None,
) -> Outcome:
    """Run a list of events."""

    def body(engine: Engine) -> None:
        for event in events:
            engine.apply(event)

    return run(shape, connector, body, limits)


def random_history(
    seed: int, steps: int = HISTORY_STEPS, groups: Groups = "full", cell: Cell | None = None
) -> tuple[Shape, list[Event]]:
    """The shape and the events that belong to a seed; in a cell of the grid its groups count."""
    rng = random.Random(seed)
    shape = random_shape(rng, groups, cell)
    return shape, Generator(shape, rng).events(steps)


def run_seed(
    seed: int,
    connector: ConnectorChoice,
    steps: int = HISTORY_STEPS,
    groups: Groups = "full",
    limits: Limits | None = None,
    cell: Cell | None = None,
) -> Outcome:
    """Run the random history of a seed."""
    shape, events = random_history(seed, steps, groups, cell)
    return run_events(shape, fitted(connector, shape, seed), events, limits)


def with_replay(outcome: Outcome, command: str) -> Outcome:
    """The outcome with a replay command in its finding, if it has one."""
    if outcome.finding is not None:
        outcome.finding = replace(outcome.finding, replay=command)
    return outcome


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "shape": outcome.shape.as_dict(),
        "finding": outcome.finding.as_dict() if outcome.finding else None,
        "counts": outcome.counts,
        "seconds": round(outcome.seconds, 3),
    }
