"""Warm starts of two connectors: what is compared, from what the child processes send."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonstep.bench.growth import Growth
from moonstep.bench.peers import Outcome, Warm, as_table, plans
from moonstep.bench.peers_plan import MOONSTEP, STOCK, PeerPlan

GROWTH = {name: Growth(1 << 20, 1.0) for name in (MOONSTEP, STOCK)}


def warm(seconds: float, answers: tuple[tuple[int, ...], ...] = ((1, 2), (3, 4))) -> Warm:
    raw = {"first_token_s": [seconds / 2] * 2, "settle_s": 0.1, "tokens": answers}
    return Warm.from_raw(raw)


def test_warm_starts_are_compared_by_their_ratio() -> None:
    cold = {MOONSTEP: warm(8.0), STOCK: warm(8.0)}
    starts = {MOONSTEP: [warm(1.0), warm(2.0)], STOCK: [warm(2.0), warm(4.0)]}
    found = Outcome(cold, starts, GROWTH)
    assert found.ratio.value == pytest.approx(0.5)
    assert found.answers_differ == 0
    assert as_table(found).row_count == 6


def test_answers_that_differ_are_counted() -> None:
    cold = {MOONSTEP: warm(8.0), STOCK: warm(8.0, ((1, 2), (9, 9)))}
    found = Outcome(cold, {MOONSTEP: [warm(1.0)], STOCK: [warm(2.0, ((0, 0), (9, 9)))]}, GROWTH)
    assert found.answers_differ == 3


def test_the_engines_differ_in_their_connector_alone() -> None:
    compared = plans("model", (0, 1), "mooncake://127.0.0.1:1?segment=0", Path("settings.json"))
    ours, theirs = (compared[name].engine_arguments() for name in (MOONSTEP, STOCK))
    assert ours.pop("kv_transfer_config")["kv_connector"] == MOONSTEP
    assert theirs.pop("kv_transfer_config")["kv_connector"] == STOCK
    assert ours == theirs
    assert PeerPlan.from_json(compared[STOCK].to_json()) == compared[STOCK]
