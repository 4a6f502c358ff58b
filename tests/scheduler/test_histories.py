"""Random histories in the real scheduler, with every life's tables compared after every step.

The audit runs thousands of these through the connector's outside; here a few look inside as well.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from moonstep.audit.driver import random_history
from moonstep.audit.groupsets import block_bytes
from tests.scheduler.engine import open_engine
from tests.scheduler.test_ranks import raising, suppressed


def settings_of(seed: int, unit_bytes: int) -> dict[str, Any]:
    """Tight settings of every kind: few slots, small budgets, loads at once and in slices."""
    rng = random.Random(seed)
    return {
        "slots": rng.choice((1, 3, 8, 20, 60, 400)),
        "capture": rng.choice(("eager", "lazy")),
        "victim_bytes": rng.choice((0, 2 * unit_bytes, 1 << 30)),
        "leaver_bytes": rng.choice((unit_bytes, 1 << 30)),
        "sync_restore_bytes": rng.choice((0, 3 * unit_bytes, 1 << 30)),
        "restore_slice_bytes": rng.choice((1, 2 * unit_bytes, 1 << 30)),
        "idle_restore_bytes": rng.choice((0, 1 << 30)),
        "min_hit_tokens": rng.choice((0, 0, 9)),
        "first_step": rng.random() < 0.5,
    }


@pytest.mark.parametrize("seed", range(14))
def test_tables_books_and_bytes_are_right_in_any_history(seed: int) -> None:
    shape, events = random_history(seed, steps=90)
    with open_engine(shape, **settings_of(seed, block_bytes(shape) // shape.ranks)) as watched:
        watched.apply(*events)


@pytest.mark.parametrize("seed", range(1000, 1010))
def test_they_are_with_ranks_that_fail_on_and_off_as_well(seed: int) -> None:
    shape, events = random_history(seed, steps=90)
    rng = random.Random(seed)
    with open_engine(shape, **settings_of(seed, block_bytes(shape) // shape.ranks)) as watched:
        while events:
            part = [events.pop(0) for _ in range(min(len(events), rng.randint(1, 12)))]
            failing = rng.choice((suppressed, raising, None))
            if failing is None:
                watched.apply(*part)
            else:
                with failing(watched, rng.randrange(shape.ranks)):
                    watched.apply(*part)
