"""Stage: what a scenario says and asks while it drives an engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moonstep.audit import connectors, driver, pool
from moonstep.audit.findings import DEADLY, HANGING, Finding, Kind
from moonstep.audit.history import Abort, Arrive, Close, Extend, Reset
from moonstep.audit.shape import Cell, Groups, Shape, lengthened

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonstep.audit.engine import Engine
    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.limits import Limits

BASE = Shape(
    block_tokens=16, blocks=21, seats=4, budget_tokens=128, max_tokens=128, layers=1, heads=2
)
"""The engine of most scenarios: blocks of 16 tokens, memory for 20 of them."""


FILLERS = 8
"""How many different prompts push others out of the engine; they are computed, never loaded."""
MOST_ROUNDS = 8
"""How often as many prompts as memory holds are enough to push everything out of it."""
REFUSED = "refused: "
"""How the reason of a result begins where the connector did not start."""


class Status(enum.StrEnum):
    """What a scenario came to."""

    CLEAN = "clean"
    FINDING = "finding"
    HANG = "hang"
    DEAD = "dead"
    NOT_REACHED = "not reached"
    """It did not come to what it claims: the scenario itself fails."""
    NOT_APPLICABLE = "does not apply"


class DoesNotApply(Exception):
    """The scenario has no meaning for this connector or shape; the message says why."""


def as_it_is(shape: Shape) -> Shape:
    """The shape of the matrix, unchanged."""
    return shape


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named case.

    `body` drives the engine; `adapt` turns a shape of the matrix into this scenario's, or raises
    `DoesNotApply`; `regroup` does so once the groups are those of the audit; `case` is the number
    in the list of faults it comes from, if it has one.
    """

    name: str
    title: str
    body: Callable[[Stage], None]
    adapt: Callable[[Shape], Shape] = as_it_is
    case: str = ""
    regroup: Callable[[Shape], Shape] = as_it_is


@dataclass(slots=True)
class Result:
    """One scenario in one shape."""

    scenario: str
    shape: Shape
    status: Status
    variant: str = ""
    reason: str = ""
    finding: Finding | None = None
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Stage:
    """An engine, with the verbs of a scenario."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shape = engine.shape
        self._count = 0

    def arrive(self, name: str, tokens: int, family: int = 1, **facts: Any) -> None:
        """A request of `tokens` prompt tokens, all its family's unless `shared` is given."""
        facts.setdefault("shared", tokens)
        self.engine.apply(Arrive(name, family, tokens, **facts))

    def extend(self, name: str, tokens: int, output: int = 1, variant: int = 0) -> None:
        """The next input of a streaming session."""
        self.engine.apply(Extend(name, tokens, variant, output))

    def close(self, name: str) -> None:
        """The end of a streaming session's input."""
        self.engine.apply(Close(name))

    def abort(self, name: str, late: bool = False) -> None:
        """The client of a request goes away."""
        self.engine.apply(Abort(name, late))

    def reset(self, running: bool = False, connector: bool = False) -> None:
        """Reset the engine's prefix cache, and on request the connector's."""
        self.engine.apply(Reset(running, connector))

    def step(self, count: int = 1) -> None:
        """Let the engine take some steps."""
        for _ in range(count):
            self.engine.step()

    def settle(self, limit: int = 3000) -> None:
        """Step until the engine has nothing left to do."""
        for _ in range(limit):
            if not self.engine.step():
                return
        self.engine.report(Kind.HANG, f"requests are left after {limit} steps")

    def until(self, condition: Callable[[], bool], what: str, limit: int = 300) -> None:
        """Step until something is so; that it never is makes the scenario itself fail."""
        for _ in range(limit):
            if condition():
                return
            if not self.engine.step():
                break
        self.exercised(condition(), what)

    def exercised(self, condition: bool, what: str) -> None:
        """The scenario did what it claims; otherwise it is a failing test."""
        if not condition:
            self.engine.report(Kind.NOT_EXERCISED, what)

    def expect(self, condition: bool, detail: str) -> None:
        """Something has to hold for any connector; otherwise it is a finding."""
        if not condition:
            self.engine.report(Kind.WRONG_OUTPUT, detail)

    def warm(self, tokens: int, family: int = 1, output: int = 1) -> None:
        """Have a prompt computed and kept, and lost by the engine's own prefix cache."""
        self._count += 1
        self.arrive(f"warm{self._count}", tokens, family=family, output=output)
        self.settle()
        self.forget()

    def forget(self) -> None:
        """Let other prompts run through all of the engine's memory, so that it loses what it had.

        A connector may wait with saving until the engine is about to lose a block; a reset of the
        prefix cache alone would take blocks away before it has seen that coming.
        """
        before, tokens = self._named(), self.shape.max_tokens - self.shape.block_tokens
        least = self.shape.blocks * self.shape.block_tokens // tokens + 1
        for number in range(MOST_ROUNDS * least):
            # What a window leaves without a name is taken again first: then it takes more of them.
            if number >= least and not before & self._named():
                break
            self._count += 1
            family = 1000 + self._count % FILLERS
            self.arrive(f"filler{self._count}", tokens, family=family, skip_cache=True)
            self.settle()
        for _ in range(3):
            self.engine.empty_step()
        self.reset()

    def _named(self) -> set[tuple[int, bytes]]:
        return pool.named(self.engine.scheduler)

    @property
    def loads(self) -> int:
        """Loads that were given blocks so far."""
        return self.engine.seam.counts.sync_loads + self.engine.seam.counts.async_loads

    def must_load(self, before: int) -> None:
        """Loads have happened since `before`; a connector that loads nothing is out of scope."""
        if self.engine.scheduler.connector is None:
            raise DoesNotApply("no connector")
        if self.loads == before:
            raise DoesNotApply("the connector promised nothing for a prompt it had seen")

    def running(self, name: str) -> bool:
        """Whether a request is in the running queue."""
        return any(request.request_id == name for request in self.engine.scheduler.running)

    def output_tokens(self, name: str) -> int:
        """How many tokens a client has received."""
        return self.engine.clients.by_id[name].received


def with_groups(shape: Shape, groups: Groups) -> Shape:
    """The same shape with other KV cache groups, and memory for as many tokens."""
    blocks_each = shape.blocks - 1
    grouped = replace(shape, groups=groups, blocks=len(groups) * shape.blocks)
    return replace(grouped, blocks=grouped.group_count * blocks_each + 1)


def play(
    scenario: Scenario,
    shape: Shape,
    connector: ConnectorChoice,
    variant: str = "",
    groups: Groups = "full",
    limits: Limits | None = None,
    cell: Cell | None = None,
) -> Result:
    """Run a scenario in one shape of the matrix, with one of the connector's sets of settings.

    In a cell of the grid the shape is one of the cell's (`grid.shape_of`), and its groups count.
    """
    reasons: list[str] = []

    def body(engine: Engine) -> None:
        try:
            scenario.body(Stage(engine))
        except DoesNotApply as reason:
            reasons.append(str(reason))

    try:
        shape = with_groups(scenario.adapt(shape), cell.groups if cell else groups)
        if cell is not None and cell.longer:
            shape = lengthened(shape, cell.longer, cell.longer_times)
        shape = scenario.regroup(shape)
    except DoesNotApply as reason:
        return Result(scenario.name, shape, Status.NOT_APPLICABLE, variant, str(reason))
    outcome = driver.run(shape, connectors.varied(connector, shape, variant), body, limits)
    status = status_of(outcome.finding)
    if outcome.finding is not None and outcome.finding.kind is Kind.REFUSED:
        reasons.append(REFUSED + outcome.finding.detail)
        outcome.finding = None
    elif reasons and outcome.finding is None:
        status = Status.NOT_APPLICABLE
    return Result(
        scenario.name,
        shape,
        status,
        variant,
        "; ".join(reasons),
        outcome.finding,
        outcome.counts,
        outcome.seconds,
    )


def status_of(finding: Finding | None) -> Status:
    """The word for a finding in a table."""
    if finding is None:
        return Status.CLEAN
    if finding.kind is Kind.NOT_EXERCISED:
        return Status.NOT_REACHED
    if finding.kind is Kind.REFUSED:
        return Status.NOT_APPLICABLE
    if finding.kind in DEADLY:
        return Status.DEAD
    if finding.kind in HANGING:
        return Status.HANG
    return Status.FINDING
