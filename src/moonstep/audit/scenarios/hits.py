"""Hits: what is promised, how much of it, and what happens to the promise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moonstep.audit.scenarios.stage import DoesNotApply, Scenario

if TYPE_CHECKING:
    from moonstep.audit.scenarios.stage import Stage
    from moonstep.audit.shape import Shape


def full_hits(stage: Stage) -> None:
    """Prompts around block ends, all kept; the engine has none, all, or all but one block."""
    lengths = (16, 17, 31, 32, 33, 48)
    for length in lengths:
        stage.warm(length, family=length)
    before = stage.loads
    for length in lengths:
        for local in (0, length // 16, length // 16 - 1):
            stage.forget()
            if local > 0:
                stage.arrive(f"local-{length}-{local}", 16 * local, family=length)
                stage.settle()
            stage.arrive(f"hit-{length}-{local}", length, family=length)
            stage.settle()
    stage.must_load(before)


def equal_requests(stage: Stage) -> None:
    """Two and more equal requests in one step, everything kept."""
    stage.warm(80)
    before = stage.loads
    for count in (2, 3, 4):
        for index in range(count):
            stage.arrive(f"e{count}-{index}", 80)
        stage.settle()
        stage.forget()
    stage.must_load(before)


def branching_prefixes(stage: Stage) -> None:
    """Prompts that share a prefix and part inside and at the end of blocks."""
    stage.warm(112)
    before = stage.loads
    for shared in (15, 16, 17, 63, 64, 65, 111, 112):
        for variant in (1, 2):
            stage.arrive(f"b{shared}-{variant}", 112, shared=shared, variant=variant)
        stage.settle()
        stage.forget()
    stage.must_load(before)


def skip_reading(stage: Stage) -> None:
    """A request for prompt log-probabilities: whatever is promised, nothing may be loaded."""
    stage.warm(96)
    before = stage.loads
    stage.arrive("p", 96, skip_cache=True)
    stage.settle()
    stage.expect(stage.loads == before, "a request that must not read the cache was given a load")
    stage.forget()
    stage.arrive("q", 96)
    stage.settle()
    stage.must_load(before)


def chunked_prefill(stage: Stage) -> None:
    """A prompt of several chunks, between others; then the whole of it is asked again."""
    stage.arrive("long", 120, family=1)
    stage.arrive("other", 40, family=2, output=6)
    stage.settle()
    stage.exercised(stage.engine.counts.steps >= 4, "the prompt was not cut into chunks")
    stage.forget()
    before = stage.loads
    stage.arrive("again", 121, family=1, shared=120)
    stage.settle()
    stage.must_load(before)


def small_budget(shape: Shape) -> Shape:
    """Chunks of 40 tokens, which end inside blocks."""
    if not shape.chunked:
        raise DoesNotApply("chunked prefill is off")
    return replace(shape, budget_tokens=40)


def chat(stage: Stage) -> None:
    """Each prompt is the last turn with its output; the engine keeps nothing between turns."""
    stage.arrive("turn0", 30, output=10)
    stage.settle()
    for turn in range(1, 5):
        stage.forget()
        stage.arrive(f"turn{turn}", 30 + 18 * turn, output=9, shared=128, follows=f"turn{turn - 1}")
        stage.settle()
    if not stage.loads:
        raise DoesNotApply("the connector promised nothing for a prompt it had seen")


def no_prefix_cache(shape: Shape) -> Shape:
    """The engine's own prefix cache is off."""
    return replace(shape, prefix_caching=False)


def without_prefix_cache(stage: Stage) -> None:
    """The engine keeps no hashes: each block has to be vouched for by the request's table."""
    for index in range(6):
        stage.arrive(f"r{index}", 64 + 8 * index, shared=64 + 8 * index, output=4)
        stage.step(2)
    stage.settle()
    before = stage.loads
    stage.arrive("again", 100)
    stage.settle()
    if stage.loads == before:
        raise DoesNotApply("the connector promised nothing for a prompt it had seen")


def reset_with_connector(stage: Stage) -> None:
    """A reset of both caches ("new weights"): nothing from before it may be served after it."""
    stage.warm(96)
    stage.arrive("r", 64, family=2, output=20)
    stage.step(4)
    stage.reset(running=True, connector=True)
    stage.arrive("old", 96)
    stage.arrive("old2", 64, family=2)
    stage.settle()
    stage.reset(connector=True)
    stage.exercised(stage.engine.epoch >= 1, "no reset of both caches succeeded")
    stage.arrive("old3", 96)
    stage.settle()


def reset_beside_running(stage: Stage) -> None:
    """The connector is reset while requests run on, and go on saving."""
    stage.warm(96)
    stage.arrive("r", 96, output=20)
    stage.step(3)
    stage.reset(connector=True)
    stage.step(6)
    stage.arrive("s", 96)
    stage.settle()
    stage.forget()
    stage.arrive("t", 96)
    stage.settle()


SCENARIOS = (
    Scenario("full-hits", "prompts of 16, 17, 31, 32, 33 and 48 tokens, kept", full_hits, case="7"),
    Scenario("equal-requests", "equal requests in one step", equal_requests),
    Scenario("branches", "prompts that share a part of a kept prefix", branching_prefixes),
    Scenario("skip-reading", "prompt log-probabilities: no cache may be read", skip_reading),
    Scenario("chunked-prefill", "chunks that end inside blocks", chunked_prefill, small_budget),
    Scenario("chat", "each prompt is the last turn and its output", chat),
    Scenario(
        "no-prefix-cache", "the engine's prefix cache is off", without_prefix_cache, no_prefix_cache
    ),
    Scenario("reset-connector", "both caches reset under running requests", reset_with_connector),
    Scenario("reset-beside", "the connector reset beside running requests", reset_beside_running),
)
