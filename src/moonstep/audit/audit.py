"""Audit: a whole run over scenarios and random histories, and its verdict."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moonstep.audit import connectors, driver, scenarios
from moonstep.audit.findings import Finding, Kind
from moonstep.audit.jobs import Done, HistoriesJob, Pool, ScenarioJob, ShrinkJob
from moonstep.audit.scenarios.stage import BASE, Result, Status, status_of
from moonstep.audit.shape import Groups, matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.jobs import Job
    from moonstep.audit.replay import Replay

HISTORIES_A_JOB = 10
SPARE_HISTORIES = 3
MOST_FINDINGS = 20
"""After so many random findings no further history is begun."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be audited. `steps` are engine steps of random histories, over all of them.

    `real_store`: over the real store of this connector, not over a stand-in.
    """

    connector: ConnectorChoice
    scenarios: tuple[str, ...]
    steps: int
    seed: int
    jobs: int
    groups: Groups = "full"
    shrinks: int = 3
    real_store: bool = False


@dataclass(slots=True)
class RandomFinding:
    """A finding of a random history; `short` is its shrunk history."""

    seed: int
    finding: Finding
    shape: str
    short: Replay | None = None


@dataclass(slots=True)
class Verdict:
    """What an audit came to."""

    order: Order
    results: list[Result] = field(default_factory=list)
    histories: int = 0
    counts: Counter[str] = field(default_factory=Counter)
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
    if order.groups != "full":
        words.append(f"--groups {order.groups}")
    if order.real_store:
        words.append("--real-mooncake")
    return " ".join([*words, *more])


def plan(order: Order) -> tuple[list[Job], list[Job]]:
    """Jobs of the scenarios, and jobs of the random histories."""
    of_scenarios: list[Job] = [
        ScenarioJob(name, shape, order.connector, variant, order.groups)
        for name in order.scenarios
        for variant in connectors.variants_of(order.connector)
        for shape in matrix(BASE)
    ]
    count = -(-order.steps // driver.HISTORY_STEPS)
    if count > 1:
        count *= SPARE_HISTORIES  # a history may end early; no more begin once there are enough
    length = min(order.steps, driver.HISTORY_STEPS)
    seeds = range(order.seed, order.seed + count)
    of_histories: list[Job] = [
        HistoriesJob(tuple(seeds[i : i + HISTORIES_A_JOB]), length, order.connector, order.groups)
        for i in range(0, len(seeds), HISTORIES_A_JOB)
    ]
    return of_scenarios, of_histories


def perform(order: Order, told: Callable[[str, int, int], None]) -> Verdict:
    """Run an audit; `told(phase, done, total)` hears of progress.

    `ValueError` when there is no real store to drive the connector over, and there should be.
    """
    verdict = Verdict(order)
    of_scenarios, of_histories = plan(order)
    if order.real_store:
        connectors.use_real_store(order.connector.name)
    with Pool(order.jobs, order.connector.name, real_store=order.real_store) as pool:
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
    shape = driver.random_history(done.part, job.steps, job.groups)[0]
    finding = _lost(done.problem, job.deadline_s) if done.problem else done.value.finding
    if finding is not None and finding.kind is Kind.REFUSED:
        verdict.counts["refused"] += 1
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
    jobs: list[Job] = [ShrinkJob(seed, steps, order.connector, order.groups) for seed in by_seed]
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
