"""The bench: clean where nothing is wrong, and a finding for each thing that is."""

from __future__ import annotations

import doctest
import importlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from moonstep.audit import driver, history, replay, shape
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.findings import Kind
from moonstep.audit.limits import Limits

if TYPE_CHECKING:
    from moonstep.audit.driver import Outcome

EXAMPLE = ConnectorChoice("example_connector:ExampleConnector")
MOONSTEP = ConnectorChoice("MoonstepConnector")
SHORT = Limits(stalled_steps=60, stalled_s=2, passed_over=60, drain_steps=3_000)


def run_all(connector: ConnectorChoice, seeds: range) -> Counter[str]:
    """Figures of all histories; fails with the first finding."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        outcome = driver.run_seed(seed, connector)
        assert outcome.finding is None, f"seed {seed}: {outcome.finding}"
        counts.update(outcome.counts)
    return counts


def first_finding(connector: ConnectorChoice, seeds: int = 60) -> Outcome:
    """The outcome of the first history with a finding."""
    for seed in range(seeds):
        outcome = driver.run_seed(seed, connector, limits=SHORT)
        if outcome.finding is not None:
            return outcome
    pytest.fail(f"no finding in {seeds} histories")


def test_the_scheduler_alone_is_clean() -> None:
    counts = run_all(ConnectorChoice(None), range(60))
    assert counts["preemptions"] > 50
    assert counts["resumes"] > 50
    assert counts["aborted"] > 50
    assert counts["lookups"] == 0


def test_the_example_connector_is_clean_and_loads() -> None:
    counts = run_all(EXAMPLE, range(40))
    assert counts["sync_loads"] > 100
    assert counts["resets"] > 30


@pytest.mark.parametrize("part", range(4))
def test_moonstep_is_clean_in_random_histories(part: int) -> None:
    counts: Counter[str] = Counter()
    seed = 10_000 * part
    while counts["steps"] < 5_000:
        counts += run_all(MOONSTEP, range(seed, seed + 5))
        seed += 5
    assert counts["sync_loads"] > 50
    assert counts["async_loads"] > 20
    assert counts["kept_compared"] > 5_000


@pytest.mark.parametrize(
    ("connector", "kinds"),
    [
        ("StrayWriter", {Kind.STRAY_WRITE}),
        ("WrongBytes", {Kind.WRONG_KV}),
        ("LoadsNothing", {Kind.WRONG_KV}),
        ("Raises", {Kind.HOOK_RAISED}),
        ("PromisesAll", {Kind.BAD_ANSWER}),
        ("NeverSure", {Kind.PASSED_OVER}),
        ("Holds", {Kind.LEAK}),
        ("LosesThread", {Kind.THREAD_DIED}),
        ("NeverDone", {Kind.HANG}),
        ("OldWeights", {Kind.WRONG_KV}),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_wrong_is_seen(connector: str, kinds: set[Kind]) -> None:
    outcome = first_finding(ConnectorChoice(f"faulty_connectors:{connector}"))
    assert outcome.finding is not None
    assert outcome.finding.kind in kinds, outcome.finding


def test_a_seed_replays() -> None:
    first, second = (driver.run_seed(7, EXAMPLE) for _ in range(2))
    assert first.counts == second.counts


def test_a_history_survives_its_text() -> None:
    for seed in range(50):
        made_shape, events = driver.random_history(seed)
        assert history.from_text(history.to_text(events)) == events
        assert shape.Shape.from_dict(made_shape.as_dict()) == made_shape


def test_any_part_of_a_history_is_a_history() -> None:
    rng = random.Random(3)
    for seed in range(10):
        made_shape, events = driver.random_history(seed)
        some = [event for event in events if rng.random() < 0.6]
        outcome = driver.run_events(made_shape, EXAMPLE, some)
        assert outcome.finding is None, f"seed {seed}: {outcome.finding}"


def test_a_replay_file_holds_all_that_is_needed() -> None:
    whole = replay.of_seed(5, EXAMPLE, 40)
    assert replay.Replay.from_text(whole.to_text()) == whole
    with pytest.raises(ValueError, match="begins with"):
        replay.Replay.from_text("step\n")


@pytest.mark.parametrize("line", ["stroll id=r1", "abort id=r1 loud=1"])
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        history.from_line(line)


@pytest.mark.parametrize("name", ["history", "oracle", "rank", "shape", "shrink"])
def test_examples_in_the_text_hold(name: str) -> None:
    module = importlib.import_module(f"moonstep.audit.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
