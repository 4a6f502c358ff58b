"""Two ranks, one of which does not do its part: nothing is promised over it, and no byte is wrong.

Real scheduler, real worker halves over real memory, reports pickled as between processes. The
audit's oracle reads every byte that a request uses and every byte that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from moonstep.audit import connectors
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive, Reset, Step
from moonstep.audit.shape import Shape
from moonstep.wire import Rows
from moonstep.worker.device import CpuDevice, Ticket
from tests.scheduler.engine import Watched, open_engine

SHAPE = Shape(ranks=2, executor="multi-process", blocks=40, max_tokens=64)
PROMPT: dict[str, Any] = {"family": 1, "tokens": 30, "shared": 30}
PROMPT_HIT = 28

CAPTURE = pytest.mark.parametrize("capture", ["eager", "lazy"])


class BurningDevice:
    """A device whose captures fail after half of their rows; everything else works."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def restore(self, rows: Rows) -> None:
        self._device.restore(rows)

    def capture(self, rows: Rows) -> Ticket:
        self._device.capture(rows[: len(rows) // 2])
        raise RuntimeError("the copy engine is on fire")

    def close(self) -> None:
        self._device.close()


@contextmanager
def suppressed(watched: Watched, rank: int) -> Iterator[None]:
    """The rank's captures are never asked for."""
    connector = watched.engine.ranks[rank].connector
    connector.wait_for_save = lambda: None
    try:
        yield
    finally:
        del connector.wait_for_save


@contextmanager
def raising(watched: Watched, rank: int) -> Iterator[None]:
    """The rank's captures raise half-way."""
    worker = watched.workers[rank]
    device = worker._device
    assert isinstance(device, CpuDevice)
    worker._device = BurningDevice(device)
    try:
        yield
    finally:
        worker._device = device


FAILURES = pytest.mark.parametrize("failing", [suppressed, raising])


def lose_local_copies(watched: Watched, capture: str) -> None:
    """Make the engine give its own copies away; lazily they are captured before they go."""
    if capture == "lazy":
        for index in range(6):
            watched.run(id=f"flood{index}", family=50 + index, tokens=60, shared=60)
    watched.apply(Reset())


@CAPTURE
def test_with_both_ranks_well_everything_is_promised(capture: str) -> None:
    with open_engine(SHAPE, capture=capture) as watched:
        watched.run(id="a", **PROMPT)
        lose_local_copies(watched, capture)
        assert watched.run(id="again", **PROMPT) == PROMPT_HIT


@FAILURES
@CAPTURE
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_promised_over_a_rank_that_did_not_capture(
    failing: Callable[..., Any], capture: str, rank: int
) -> None:
    with open_engine(SHAPE, capture=capture) as watched:
        with failing(watched, rank):
            watched.run(id="a", **PROMPT)
            lose_local_copies(watched, capture)
            assert watched.half.index.written_count == 0
            assert watched.run(id="again", **PROMPT) == 0
        watched.apply(Reset())
        watched.run(id="well", **PROMPT)
        lose_local_copies(watched, capture)
        assert watched.run(id="restored", **PROMPT) == PROMPT_HIT
        assert watched.half.stats.failed_blocks > 0
        assert watched.half.index.planned_count == 0


@FAILURES
def test_a_rank_that_fails_in_between_spoils_only_what_it_failed(
    failing: Callable[..., Any],
) -> None:
    """First blocks kept on both ranks, later ones on one: the promise ends before them."""
    with open_engine(SHAPE) as watched:
        watched.run(id="head", family=1, tokens=12, shared=12)
        with failing(watched, 1):
            watched.run(id="tail", family=1, tokens=30, shared=30)
        watched.apply(Reset())
        assert watched.run(id="again", **PROMPT) == 12


@FAILURES
@pytest.mark.parametrize("seed", range(3))
def test_slots_used_again_after_a_failure_hold_what_they_say(
    failing: Callable[..., Any], seed: int
) -> None:
    """A host cache of few slots, failures on and off, prompts that share prefixes, storms."""
    shape = Shape(ranks=2, executor="multi-process", blocks=18, max_tokens=64, seats=4)
    with open_engine(shape, slots=9) as watched:
        for round_ in range(6):
            arrivals = [
                Arrive(f"{round_}.{index}", (index + seed) % 3, 20, 12 + seed, output=14)
                for index in range(4)
            ]
            if round_ % 2:
                with failing(watched, (round_ // 2 + seed) % 2):
                    watched.apply(*arrivals, Step(6))
            else:
                watched.apply(*arrivals, Step(6))
            watched.settle()
        assert watched.half.stats.failed_blocks > 0
        assert watched.half.stats.restored_tokens > 0


@CAPTURE
def test_nothing_is_kept_before_every_rank_has_said_how_many_slots_it_has(capture: str) -> None:
    with open_engine(SHAPE, capture=capture, first_step=False) as watched:
        connector = watched.engine.ranks[1].connector
        connector.build_connector_worker_meta = lambda: None
        watched.run(id="a", **PROMPT)
        lose_local_copies(watched, capture)
        assert watched.half.index.slot_count == 0
        assert watched.run(id="again", **PROMPT) == 0
        del connector.build_connector_worker_meta
        watched.run(id="b", family=2, tokens=30, shared=30, output=8)
        assert watched.half.index.slot_count == 400
        lose_local_copies(watched, capture)
        assert watched.run(id="b again", family=2, tokens=30, shared=30) == PROMPT_HIT


def test_the_rank_with_the_fewest_slots_decides() -> None:
    with open_engine(SHAPE, first_step=False) as watched:
        rank = watched.engine.ranks[1]
        rank.connector.shutdown()
        small = replace(rank.connector.settings, host_cache_bytes=5 * block_bytes(SHAPE))
        rank.connector.settings = small  # as if its memory had not sufficed for more
        rank.connector.register_kv_caches(rank.memory.tensors)
        halves = [each.connector for each in watched.engine.ranks]
        watched.engine.inspector = connectors.inspect(watched.engine.scheduler.connector, halves)
        watched.engine.empty_step()
        watched.run(id="a", **PROMPT)
        watched.apply(Reset())
        assert watched.half.index.slot_count == 5
        assert watched.run(id="again", **PROMPT) == 20


def test_the_last_fill_of_a_prefill_is_kept_although_capacity_came_late() -> None:
    """What was computed before the ranks had reported is captured while its request still runs."""
    with open_engine(SHAPE, first_step=False) as watched:
        watched.run(**PROMPT, id="a", output=8)
        watched.apply(Reset())
        assert watched.run(id="again", **PROMPT) == PROMPT_HIT
