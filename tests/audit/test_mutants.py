"""Mutants: the audit finds each of Moonstep's possible defects within 2,000 random histories."""

from __future__ import annotations

import mutants
import pytest

from moonstep.audit import driver, shrink
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.limits import Limits
from moonstep.audit.replay import of_seed

MOONSTEP = ConnectorChoice("MoonstepConnector")
HISTORIES = 2_000
LIMITS = Limits(stalled_steps=100, passed_over=100)
FIRST_SEED = {
    "hash_believed": 150,
    "damaged_object_accepted": 120,
    "failed_fetch_acknowledged": 40,
    "abandoned_slots_used_again": 130,
}
"""Where to begin with a rare one, so that its test takes seconds."""


def first_seed_with_a_finding(mutant: str) -> int | None:
    """The seed of the first history in which the mutant shows."""
    first = FIRST_SEED.get(mutant, 0)
    with mutants.MUTANTS[mutant]():
        for seed in range(first, first + HISTORIES):
            finding = driver.run_seed(seed, MOONSTEP, limits=LIMITS).finding
            if finding is not None:
                assert "AttributeError" not in str(finding), "the mutant is out of date"
                return seed
    return None


@pytest.mark.parametrize("mutant", sorted(mutants.MUTANTS))
def test_the_mutant_is_found(mutant: str) -> None:
    assert first_seed_with_a_finding(mutant) is not None


def test_captures_that_fail_are_no_finding() -> None:
    with mutants.flaky_captures():
        for seed in range(25):
            outcome = driver.run_seed(seed, MOONSTEP)
            assert outcome.finding is None, f"seed {seed}: {outcome.finding}"


def test_a_finding_shrinks_to_a_short_history_that_replays() -> None:
    with mutants.MUTANTS["append_on_resume"]():
        whole = of_seed(0, MOONSTEP, driver.HISTORY_STEPS)
        finding = driver.run_events(whole.shape, whole.connector, whole.events).finding
        assert finding is not None
        short = shrink.shrink_history(
            whole.shape, whole.connector, whole.events, finding, deadline_s=60
        )
        assert len(short) <= 12
        again = driver.run_events(whole.shape, whole.connector, short).finding
        assert again is not None
        assert again.kind is finding.kind
    assert driver.run_events(whole.shape, whole.connector, short).finding is None
