"""Group sets: windows, recurrent state, latents, drafters' layers, blocks of unequal size."""

from __future__ import annotations

import doctest
from collections import Counter
from dataclasses import replace

import pytest

from moonstep.audit import driver, reach, scenarios
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.inspector import Kept
from moonstep.audit.scenarios import hybrid
from moonstep.audit.shape import GROUP_SETS, Shape

SETS = [groups for groups in GROUP_SETS if groups != "full"]


@pytest.mark.parametrize("groups", SETS)
def test_the_scheduler_alone_is_clean(groups: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(15):
        outcome = driver.run_seed(seed, ConnectorChoice(None), groups=groups)
        assert outcome.finding is None, f"seed {seed}: {outcome.finding}"
        counts.update(outcome.counts)
    assert counts["resumes"] > 10
    assert counts["finished"] > 100


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"groups": "full+ring"}, "unknown kind of group 'ring'"),
        ({"groups": "full+state", "prefix_caching": False}, "recurrent state needs"),
        ({"groups": "full", "longer": "window"}, "no group but 'window'"),
        ({"drafter": "mtp"}, "a drafter without drafts"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(facts: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(Shape(blocks=200), **facts)


def test_all_sets_can_be_played_by_name() -> None:
    names = {scenario.name for scenario in scenarios.ALL}
    assert {scenario.name for scenario in hybrid.SCENARIOS} <= names


def kept(name: bytes, rank: int, blocks: int = 1, group: int = 0) -> Kept:
    return Kept(group, name, rank, 0, lambda: b"", blocks)


def test_a_piece_counts_where_every_rank_has_it_or_a_copy_of_it() -> None:
    own, shared = [[0], [1]], [[0], [0]]
    found = [kept(b"a", 0, 3), kept(b"a", 1, 2), kept(b"b", 0)]
    assert reach.kept_runs(found, own) == {(0, b"a"): 2, (0, b"b"): 0}
    assert reach.kept_runs(found, shared) == {(0, b"a"): 3, (0, b"b"): 1}


def test_examples_in_the_text_hold() -> None:
    results = doctest.testmod(reach)
    assert results.attempted > 0
    assert results.failed == 0
