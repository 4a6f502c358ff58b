"""Scenarios: each is played, does what it claims, and finds nothing in Moonstep."""

from __future__ import annotations

import mutants
import pytest

from moonstep.audit import scenarios
from moonstep.audit.connectors import variants_of
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.findings import Kind
from moonstep.audit.scenarios import hybrid, stores
from moonstep.audit.scenarios.stage import BASE, Result, Scenario, Status, play
from moonstep.audit.shape import matrix

MOONSTEP = ConnectorChoice("MoonstepConnector")
EXAMPLE = ConnectorChoice("example_connector:ExampleConnector")
SHAPES = list(matrix(BASE))
OF_STORES = {scenario.name for scenario in stores.SCENARIOS}
OF_ONE_GROUP = [scenario for scenario in scenarios.ALL if scenario not in hybrid.SCENARIOS]
NOT_ALL_SHAPES = {"priority-preemption", "two-stages", "lag", "lag-abort"}


def check_statuses(scenario: Scenario, statuses: set[Status], *, has_store: bool) -> None:
    """Clean; out of scope only where that is known."""
    if scenario.name in OF_STORES and not has_store:
        assert statuses == {Status.NOT_APPLICABLE}
    elif scenario.name in NOT_ALL_SHAPES or scenario.name in OF_STORES:
        assert statuses == {Status.CLEAN, Status.NOT_APPLICABLE}
    else:
        assert statuses == {Status.CLEAN}


def is_only_unreached(scenario: Scenario, result: Result) -> bool:
    """A store that answers in its own time may keep a scenario from its case; others reach it."""
    if result.variant != "store" or scenario.name in OF_STORES | NOT_ALL_SHAPES:
        return False
    unreached = result.finding is not None and result.finding.kind is Kind.NOT_EXERCISED
    return unreached or result.status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("scenario", OF_ONE_GROUP, ids=lambda s: s.name)
def test_moonstep_is_clean(scenario: Scenario) -> None:
    variants = variants_of(MOONSTEP)
    statuses = set()
    for number, shape in enumerate(SHAPES):
        result = play(scenario, shape, MOONSTEP, variants[number % len(variants)])
        if is_only_unreached(scenario, result):
            continue
        assert result.finding is None, f"{shape.label()} {result.variant}: {result.finding}"
        statuses.add(result.status)
    check_statuses(scenario, statuses, has_store=True)


@pytest.mark.parametrize("scenario", OF_ONE_GROUP, ids=lambda s: s.name)
def test_the_example_connector_is_clean(scenario: Scenario) -> None:
    statuses = set()
    for shape in (SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[6]):
        result = play(scenario, shape, EXAMPLE)
        assert result.finding is None, f"{shape.label()}: {result.finding}"
        statuses.add(result.status)
    check_statuses(scenario, statuses, has_store=False)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        ("append_on_resume", "resume-uncached"),
        ("replace_one_step_late", "resume-by-reset-uncached"),
        ("end_lives_after_the_new_ones_began", "resume-by-reset"),
        ("last_token_promised", "full-hits"),
        ("reset_forgotten", "reset-connector"),
        ("capture_skipped_on_one_rank", "two-ranks"),
    ],
)
def test_a_scenario_finds_the_mutant(mutant: str, scenario: str) -> None:
    with mutants.MUTANTS[mutant]():
        found = [
            play(scenarios.by_name(scenario), shape, MOONSTEP, variant).finding
            for shape in SHAPES[:2]
            for variant in ("lazy", "eager")
        ]
    assert any(found)


def test_an_unknown_scenario_is_named() -> None:
    with pytest.raises(ValueError, match="there are: resume"):
        scenarios.by_name("resum")
