"""Audit: a whole run over scenarios and random histories, and its verdict."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moonstep.audit import connectors, driver, grid, scenarios
from moonstep.audit.findings import Finding, Kind
from moonstep.audit.jobs import Done, HistoriesJob, Pool, ScenarioJob, ShrinkJob
from moonstep.audit.scenarios.stage import BASE, Result, Status, status_of
from moonstep.audit.shape import Groups, matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.jobs import Job
    from moonstep.audit.replay import Replay
    from moonstep.audit.shape import Cell, Shape

HISTORIES_A_JOB = 10
SPARE_HISTORIES = 3
MOST_FINDINGS = 20
"""After so many random findings no further history is begun."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be audited. `steps` are engine steps of random histories, over all of them.

    `cell`: in this cell of the grid, whose groups count. `real_store`: over the real store of this
    connector, not over a stand-in.
    """

    connector: ConnectorChoice
    scenarios: tuple[str, ...]
    steps: int
    seed: int
    jobs: int
    groups: Groups = "full"
    shrinks: int = 3
    real_store: bool = False
    cell: Cell | None = None

    @property
    def place(self) -> str:
        """The cell, or the groups."""
        return self.cell.name if self.cell else self.groups


@dataclass(slots=True)
class RandomFinding:
    """A finding of a random history; `short` is its shrunk history."""

    seed: int
    finding: Finding
    shape: str
    short: Replay | None = None


@dataclass(slots=True)
class Verdict:
    """What an audit came to; `refusal` says why the connector refused a history, if it did."""

    order: Order
    results: list[Result] = field(default_factory=list)
    histories: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    refusal: str = ""
    random_findings: list[RandomFinding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def finding_count(self) -> int:
        """Findings of both sorts."""
        bad = (Status.FINDING, Status.HANG, Status.DEAD)
        return sum(r.status in bad for r in self.results) + len(self.random_findings)

    @property
    def not_reached_count(self) -> int:
        """Scenarios that did not come to what they claim."""
        return sum(r.status is Status.NOT_REACHED for r in self.results)


def command(order: Order, *more: str) -> str:
    """The command line that audits the same connector with other options."""
    words = ["moonstep audit", f"--connector {order.connector.name}"]
    if order.connector.extra_config:
        words.append(f"--extra-config '{json.dumps(order.connector.extra_config)}'")
    if order.connector.role != "kv_both":
        words.append(f"--role {order.connector.role}")
    if order.connector.load_failure_policy != "fail":
        words.append(f"--load-failure-policy {order.connector.load_failure_policy}")
    if order.cell is not None:
        words.append(f"--grid {order.cell.name}")
    elif order.groups != "full":
        words.append(f"--groups {order.groups}")
    if order.real_store:
        words.append("--real-mooncake")
    return " ".join([*words, *more])


def plan(order: Order) -> tuple[list[Job], list[Job]]:
    """Jobs of the scenarios, and jobs of the random histories."""
    choice, groups, cell = order.connector, order.groups, order.cell
    of_scenarios: list[Job] = [
        ScenarioJob(name, shape, choice, variant, groups, cell)
        for name, variant, shape in _stagings(order)
    ]
    enough = -(-order.steps // driver.HISTORY_STEPS)
    count = enough
    if enough > 1:
        count *= SPARE_HISTORIES  # a history may end early; no more begin once there are enough
    length = min(order.steps, driver.HISTORY_STEPS)
    seeds = range(order.seed, order.seed + count)
    a_job = max(1, min(HISTORIES_A_JOB, enough))
    of_histories: list[Job] = [
        HistoriesJob(tuple(seeds[i : i + a_job]), length, choice, groups, cell)
        for i in range(0, len(seeds), a_job)
    ]
    return of_scenarios, of_histories


def _stagings(order: Order) -> Iterator[tuple[str, str, Shape]]:
    """Scenario, variant and shape: all eight shapes, or those of a cell."""
    variants = connectors.variants_of(order.connector)
    for name in order.scenarios:
        if order.cell is not None:
            for variant, shape in grid.stagings(order.cell, variants, grid.turn_of(name)):
                yield name, variant, shape
            continue
        for variant in variants:
            for shape in matrix(BASE):
                yield name, variant, shape


def perform(order: Order, told: Callable[[str, int, int], None]) -> Verdict:
    """Run one audit; see `perform_each`."""
    (verdict,) = perform_each([order], told)
    return verdict


def perform_each(
    orders: Sequence[Order], told: Callable[[str, int, int], None]
) -> Iterator[Verdict]:
    """Run audits of one connector; `told(phase, done, total)` hears of progress.

    Each verdict is there as soon as its audit is over. They share processes, so all have the first
    one's connector, `jobs` and `real_store`.
    `ValueError` when there is no real store to drive the connector over, and there should be.
    """
    first = orders[0]
    if first.real_store:
        connectors.use_real_store(first.connector.name)
    with Pool(first.jobs, first.connector.name, real_store=first.real_store) as pool:
        for number, order in enumerate(orders, 1):
            among = f"{order.place} ({number} of {len(orders)}), " if len(orders) > 1 else ""

            def tell(phase: str, done: int, total: int, among: str = among) -> None:
                told(among + phase, done, total)

            started = time.perf_counter()
            verdict = _perform(order, pool, tell)
            verdict.seconds = time.perf_counter() - started
            yield verdict


def _perform(order: Order, pool: Pool, told: Callable[[str, int, int], None]) -> Verdict:
    verdict = Verdict(order)
    of_scenarios, of_histories = plan(order)
    for number, done in enumerate(pool.run(of_scenarios), 1):
        verdict.results.append(_result(order, done))
        told("scenarios", number, len(of_scenarios))
    for done in pool.run(of_histories, lambda: _is_enough(verdict)):
        _note(verdict, done)
        told("random steps", verdict.counts["steps"], order.steps)
    _shrink(verdict, pool, told)
    names = [scenario.name for scenario in scenarios.ALL]
    verdict.results.sort(key=lambda result: names.index(result.scenario))
    return verdict


def _is_enough(verdict: Verdict) -> bool:
    """Whether the steps that were asked for are done, or there are findings enough to look at."""
    if len(verdict.random_findings) >= MOST_FINDINGS:
        return True
    return verdict.counts["steps"] >= verdict.order.steps


def _result(order: Order, done: Done) -> Result:
    job = done.job
    assert isinstance(job, ScenarioJob)
    result: Result = done.value
    if done.problem is not None:
        finding = _lost(done.problem, job.deadline_s)
        result = Result(job.scenario, job.shape, status_of(finding), job.variant, finding=finding)
    if result.finding is not None:
        line = command(order, f"--scenario {job.scenario}", "--steps 0")
        result.finding = replace(result.finding, replay=line)
    return result


def _lost(problem: str, deadline_s: float) -> Finding:
    if problem == "deadline":
        return Finding(Kind.DEADLINE, 0, f"not over after {deadline_s:.0f} s")
    return Finding(Kind.ENGINE_DIED, 0, problem)


def _note(verdict: Verdict, done: Done) -> None:
    job = done.job
    assert isinstance(job, HistoriesJob)
    verdict.histories += 1
    shape = driver.random_history(done.part, job.steps, job.groups, job.cell)[0]
    finding = _lost(done.problem, job.deadline_s) if done.problem else done.value.finding
    if finding is not None and finding.kind is Kind.REFUSED:
        verdict.counts["refused"] += 1
        verdict.refusal = verdict.refusal or finding.detail
        return
    if done.problem is None:
        verdict.counts.update(done.value.counts)
    if finding is not None:
        line = command(
            verdict.order, "--scenario none", f"--seed {done.part}", f"--steps {job.steps}"
        )
        verdict.random_findings.append(
            RandomFinding(done.part, replace(finding, replay=line), shape.label())
        )


def _shrink(verdict: Verdict, pool: Pool, told: Callable[[str, int, int], None]) -> None:
    order = verdict.order
    wanted: Sequence[RandomFinding] = sorted(verdict.random_findings, key=lambda f: f.seed)
    by_seed = {found.seed: found for found in wanted[: order.shrinks]}
    steps = min(order.steps, driver.HISTORY_STEPS)
    jobs: list[Job] = [
        ShrinkJob(seed, steps, order.connector, order.groups, order.cell) for seed in by_seed
    ]
    for number, done in enumerate(pool.run(jobs), 1):
        job = done.job
        assert isinstance(job, ShrinkJob)
        by_seed[job.seed].short = done.value
        told("shrinking", number, len(jobs))


def as_dict(verdict: Verdict, versions: dict[str, str]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "connector": asdict(verdict.order.connector),
        "groups": verdict.order.groups,
        "cell": verdict.order.cell.name if verdict.order.cell else None,
        "versions": versions,
        "seconds": round(verdict.seconds, 1),
        "findings": verdict.finding_count,
        "not_reached": verdict.not_reached_count,
        "scenarios": [
            {
                "scenario": result.scenario,
                "shape": result.shape.label(),
                "variant": result.variant,
                "status": str(result.status),
                "reason": result.reason,
                "finding": result.finding.as_dict() if result.finding else None,
                "counts": result.counts,
            }
            for result in verdict.results
        ],
        "random": {
            "seed": verdict.order.seed,
            "histories": verdict.histories,
            "counts": dict(verdict.counts),
            "findings": [
                {
                    "seed": found.seed,
                    "shape": found.shape,
                    "finding": found.finding.as_dict(),
                    "history": found.short.to_text() if found.short else None,
                }
                for found in verdict.random_findings
            ],
        },
    }
