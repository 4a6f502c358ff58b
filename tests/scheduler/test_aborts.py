"""Requests that go away while their blocks are being loaded in slices, in the real scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Abort, Arrive, Reset, Step
from moonstep.audit.shape import Shape
from tests.scheduler.engine import Watched, open_engine

BASE = Shape(blocks=60, max_tokens=96, budget_tokens=96, seats=4)
SHAPES = [
    BASE,
    replace(BASE, runner="v2"),
    replace(BASE, asynchronous=True),
    replace(BASE, asynchronous=True, lag=True, executor="multi-process", ranks=2),
]
PROMPT: dict[str, Any] = {"family": 1, "tokens": 60, "shared": 60}
HIT_BLOCKS = 14

SHAPED = pytest.mark.parametrize("shape", SHAPES, ids=Shape.label)


def slices(shape: Shape, blocks: int) -> dict[str, int]:
    """Settings under which every restore is a load in slices of so many blocks."""
    return {
        "sync_restore_bytes": 0,
        "restore_slice_bytes": blocks * block_bytes(shape),
        "idle_restore_bytes": 0,
    }


def seeded(watched: Watched) -> None:
    """The host cache has the prompt, the engine has not."""
    watched.run(id="seed", **PROMPT)
    watched.apply(Reset())


def quiet_state(watched: Watched) -> tuple[int, int, int]:
    pool = watched.engine.scheduler.kv_cache_manager.block_pool
    index = watched.half.index
    return pool.get_num_free_blocks(), index.free_count, index.pinned_count


@SHAPED
@pytest.mark.parametrize("late", [False, True])
def test_abort_at_every_moment_of_a_load(shape: Shape, late: bool) -> None:
    """Before it completes, in the step that completes it, after it: capacity stays as it is."""
    with open_engine(shape, **slices(shape, 3)) as watched:
        seeded(watched)
        before = quiet_state(watched)
        assert before[2] == 0
        for steps in range(9):
            name = f"r{steps}"
            watched.apply(Arrive(name, **PROMPT, output=6), Step(steps), Abort(name, late=late))
            watched.settle()
            watched.apply(Reset())
            assert quiet_state(watched)[::2] == before[::2]
            assert watched.half.is_idle
        assert watched.half.stats.sliced_loads >= 8
        assert watched.run(id="at last", **PROMPT, output=6) == 4 * HIT_BLOCKS


@SHAPED
def test_the_same_id_again_right_after_its_load_was_aborted(shape: Shape) -> None:
    with open_engine(shape, **slices(shape, 2)) as watched:
        seeded(watched)
        for steps in (1, 2, 4, 7):
            watched.apply(Arrive("r", **PROMPT, output=6), Step(steps), Abort("r"))
            while "r" in watched.engine.scheduler.requests or watched.engine._in_flight("r"):
                watched.apply(Step())
            watched.run(id="r", family=2, tokens=40, shared=40, output=3)
            assert watched.received("r") == 3
            watched.apply(Reset())


@SHAPED
def test_equal_requests_that_load_at_the_same_time(shape: Shape) -> None:
    """Each is promised the whole and each loads; one that comes later finds what is there."""
    with open_engine(shape, **slices(shape, 4)) as watched:
        seeded(watched)
        watched.apply(Arrive("a", **PROMPT, output=4), Arrive("b", **PROMPT, output=4), Step(2))
        assert watched.half.stats.sliced_loads == 2
        watched.apply(Arrive("c", **PROMPT, output=4), Abort("a"))
        watched.settle()
        assert watched.received("b") == watched.received("c") == 4


def test_others_go_on_decoding_while_a_load_is_under_way() -> None:
    with open_engine(BASE, **slices(BASE, 1)) as watched:
        seeded(watched)
        watched.apply(Arrive("decodes", 3, 8, 8, output=60), Step(2))
        watched.apply(Arrive("loads", **PROMPT, output=2))
        for _ in range(HIT_BLOCKS):
            watched.apply(Step())
            assert set(watched.last.num_scheduled_tokens) == {"decodes"}
        watched.apply(Step(2))
        assert "loads" in watched.last.num_scheduled_tokens
        assert watched.half.stats.restored_tokens == 4 * HIT_BLOCKS
