"""What a step costs the scheduler half, in counts that no busy machine can change.

Cost follows change: an idle step costs the same whatever runs, a step that fills blocks pays for
those blocks, an admission for what is new in it. Bounds leave a margin of about a third.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

from moonstep.bench.halves import MoonstepHalf, StepCost, run_step
from moonstep.bench.world import Step, World

BLOCK_TOKENS = 16
POOL_BLOCKS = 20_000
MODES = ("lazy", "eager")
_OURS = ("/moonstep/scheduler/", "/moonstep/engines/", "/moonstep/wire.py")


@dataclass(slots=True)
class Calls:
    """Calls of our functions, and calls into C that they make."""

    python: int = 0
    c: int = 0

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_call"):
            return
        if any(part in frame.f_code.co_filename for part in _OURS):
            if event == "call":
                self.python += 1
            else:
                self.c += 1


@contextmanager
def counted() -> Iterator[Calls]:
    calls = Calls()
    sys.setprofile(calls.count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@dataclass(frozen=True, slots=True)
class Counted:
    """One step: what it cost, in calls, bytes and objects."""

    calls: int
    cost: StepCost
    step: Step


class Driver:
    """A Moonstep scheduler half in a world of its own."""

    def __init__(self, mode: str) -> None:
        self.world = World(BLOCK_TOKENS, POOL_BLOCKS)
        self.half = MoonstepHalf(self.world, POOL_BLOCKS, {"capture": mode})

    def request(self, name: str, tokens: int) -> Any:
        return self.world.request(name, list(range(tokens)))

    def run(self, make: Callable[[], Step]) -> Counted:
        step = make()
        with counted() as calls:
            cost = run_step(self.half, self.world, step)
        return Counted(calls.python + calls.c, cost, step)

    def running(self, count: int, extra_tokens: Callable[[int], int]) -> None:
        """``count`` requests decode, of 64 tokens and a few more."""
        requests = [self.request(f"r{n}", 64 + extra_tokens(n)) for n in range(count)]
        self.run(lambda: self.world.admit(requests))
        self.run(self.world.decode)


@pytest.fixture(params=MODES)
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


def idle(driver: Driver, running: int) -> Counted:
    driver.running(running, lambda number: 1)
    found = driver.run(driver.world.decode)
    assert not found.step.filled_blocks
    assert not found.step.new_blocks
    return found


@pytest.mark.parametrize("mode", MODES)
def test_an_idle_step_costs_the_same_whatever_runs(mode: str) -> None:
    few, many = idle(Driver(mode), 8), idle(Driver(mode), 512)
    assert many.calls == few.calls
    assert many.cost.wire_bytes == few.cost.wire_bytes


def test_an_idle_step_is_a_few_calls_and_a_few_bytes(driver: Driver) -> None:
    found = idle(driver, 64)
    assert found.calls <= 20
    assert found.cost.wire_bytes <= 300
    assert found.cost.kept_objects <= 10


def test_a_step_that_fills_blocks_pays_for_those_blocks(driver: Driver) -> None:
    """512 requests decode, a sixteenth of them fills a block in every step."""
    driver.running(512, lambda number: number % BLOCK_TOKENS)
    driver.run(driver.world.decode)
    found = driver.run(driver.world.decode)
    assert found.step.filled_blocks == 32
    assert found.calls <= 60 + 43 * 32
    assert found.cost.wire_bytes <= 320 + 18 * 32


def test_lazily_a_block_that_fills_costs_nothing() -> None:
    """Only what a step hands out is noted, all of it at once."""

    def filling(running: int) -> Counted:
        driver = Driver("lazy")
        driver.running(running, lambda number: number % BLOCK_TOKENS)
        driver.run(driver.world.decode)
        return driver.run(driver.world.decode)

    few, many = filling(64), filling(512)
    assert (few.step.filled_blocks, many.step.filled_blocks) == (4, 32)
    assert many.calls == few.calls <= 130


def test_an_admission_pays_for_its_own_blocks(driver: Driver) -> None:
    """... and not for the requests that run beside it."""
    driver.running(512, lambda number: 1)
    driver.run(driver.world.decode)
    found = driver.run(lambda: driver.world.admit([driver.request("new", 640)]))
    assert found.step.filled_blocks == 40
    assert found.calls <= 120 + 10 * 40
    assert found.cost.wire_bytes <= 320 + 18 * 40


def test_a_long_prompt_costs_few_calls_a_block(driver: Driver) -> None:
    """128k tokens in chunks of 8,192: what is done for a run of blocks is done at once."""
    prompt = driver.request("prompt", 128 << 10)
    chunks = [driver.run(lambda: driver.world.admit([prompt], 8192))]
    while prompt.num_computed_tokens < prompt.num_tokens - 1:
        chunks.append(driver.run(lambda: driver.world.chunk(prompt, 8192)))
    blocks = sum(chunk.step.filled_blocks for chunk in chunks)
    assert blocks == 8192
    assert sum(chunk.calls for chunk in chunks) <= 0.7 * blocks
    assert sum(chunk.cost.wire_bytes for chunk in chunks) <= 22 * blocks


@pytest.mark.parametrize("mode", MODES)
def test_a_step_costs_the_same_however_long_the_context_is(mode: str) -> None:
    def filling(tokens: int) -> Counted:
        driver = Driver(mode)
        driver.run(lambda: driver.world.admit([driver.request("r", tokens - 1)]))
        driver.run(driver.world.decode)
        for _ in range(15):
            driver.run(driver.world.decode)
        found = driver.run(driver.world.decode)
        assert found.step.filled_blocks == 1, found.step
        return found

    short, long = filling(1024), filling(64 << 10)
    assert long.calls <= 1.2 * short.calls + 10
    assert long.cost.wire_bytes <= short.cost.wire_bytes + 32
