"""What a start says about the engine's own flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonstep.audit.shape import Shape
from moonstep.engines.vllm.advice import retention_advice
from tests.engines.conftest import configured, create

STATES = Shape(groups="full+state", blocks=48)


def test_states_of_answers_need_an_interval_and_the_line_says_which_and_what_it_costs(
    lines: list[str],
) -> None:
    connector = create(configured(STATES))
    (line,) = [line for line in lines if line.startswith("moonstep:")]
    assert line == retention_advice(connector.facts)
    assert "--prefix-cache-retention-interval 4 (or a multiple)" in line
    state = connector.facts.groups[1]
    costs = replace(connector.facts, groups=(replace(state, block_bytes=3 << 20),))
    assert "each one takes 3.0 MiB" in (retention_advice(costs) or "")


@pytest.mark.parametrize(
    "shape",
    [
        replace(STATES, interval_tokens=8),
        replace(STATES, interval_tokens=None),
        Shape(groups="full+window", blocks=48),
    ],
    ids=["an interval", "all", "no states"],
)
def test_nothing_is_said_where_nothing_is_to_be_set(shape: Shape, lines: list[str]) -> None:
    create(configured(shape))
    assert [line for line in lines if line.startswith("moonstep:")] == []
