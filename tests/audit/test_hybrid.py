"""Moonstep over group sets: clean in histories and scenarios, and each mutant is found."""

from __future__ import annotations

from collections import Counter

import hybrid_mutants
import pytest

from moonstep.audit import driver, scenarios
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.findings import Finding, Kind
from moonstep.audit.limits import Limits
from moonstep.audit.scenarios import hybrid
from moonstep.audit.scenarios.stage import BASE, Scenario, Status, play
from moonstep.audit.shape import GROUP_SETS, matrix

MOONSTEP = ConnectorChoice("MoonstepConnector")
SETS = [groups for groups in GROUP_SETS if groups != "full"]
SHAPES = list(matrix(BASE))
HISTORIES = 300
LIMITS = Limits(stalled_steps=100, passed_over=100)


def history(seed: int, groups: str) -> tuple[Finding | None, dict[str, int]]:
    """What a seed's history came to; one that Moonstep refused came to nothing."""
    outcome = driver.run_seed(seed, MOONSTEP, groups=groups, limits=LIMITS)
    finding = outcome.finding
    if finding is not None and finding.kind is Kind.REFUSED:
        return None, {"refused": 1}
    return finding, outcome.counts


@pytest.mark.parametrize("groups", SETS)
def test_moonstep_is_clean_in_random_histories(groups: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(30):
        finding, figures = history(seed, groups)
        assert finding is None, f"seed {seed}: {finding}"
        counts.update(figures)
    assert counts["refused"] < 20
    assert counts["sync_loads"] + counts["async_loads"] > 5
    assert counts["kept_compared"] > 1_000


@pytest.mark.parametrize("groups", GROUP_SETS)
@pytest.mark.parametrize("scenario", hybrid.SCENARIOS, ids=lambda s: s.name)
def test_moonstep_is_clean_over_groups(scenario: Scenario, groups: str) -> None:
    variants = ("lazy", "eager", "store")
    number = hybrid.SCENARIOS.index(scenario) + GROUP_SETS.index(groups)
    shape, variant = SHAPES[number % len(SHAPES)], variants[number % len(variants)]
    result = play(scenario, shape, MOONSTEP, variant, groups)
    assert result.finding is None, f"{shape.label()} {variant}: {result.finding}"
    assert result.status in (Status.CLEAN, Status.NOT_APPLICABLE)


@pytest.mark.parametrize("name", sorted(hybrid_mutants.CASES))
def test_the_mutant_is_found(name: str) -> None:
    case = hybrid_mutants.CASES[name]
    with case.mutant():
        if case.scenario:
            scenario = scenarios.by_name(case.scenario)
            found = [
                play(scenario, SHAPES[0], MOONSTEP, variant, case.groups).finding
                for variant in ("lazy", "eager")
            ]
            assert any(found)
            return
        assert any(history(seed, case.groups)[0] for seed in range(HISTORIES))


def test_a_window_given_up_shows_when_its_prompt_comes_again() -> None:
    """In the host cache alone: what has been pushed is in the store all the same."""
    scenario = scenarios.by_name("answered")
    with hybrid_mutants.CASES["window_given_up_at_its_boundary"].mutant():
        finding = play(scenario, SHAPES[0], MOONSTEP, "eager", "full+window").finding
    assert finding is not None
    assert finding.kind in (Kind.BOOKS, Kind.UNUSED)
