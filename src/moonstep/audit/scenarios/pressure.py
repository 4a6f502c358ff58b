"""Pressure: no memory, no seats, other ranks, drafts, and workers that lag behind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moonstep.audit.scenarios.stage import DoesNotApply, Scenario

if TYPE_CHECKING:
    from moonstep.audit.scenarios.stage import Stage
    from moonstep.audit.shape import Shape


def ten_blocks(shape: Shape) -> Shape:
    """Memory for ten blocks."""
    return replace(shape, blocks=11)


def nine_blocks_by_priority(shape: Shape) -> Shape:
    """Memory for nine blocks, under the priority policy."""
    if shape.policy != "priority":
        raise DoesNotApply("only under the priority policy")
    return replace(shape, blocks=10)


def failed_allocation(stage: Stage) -> None:
    """A promise is made, the blocks are not there; the same request is asked again later."""
    stage.warm(112, family=1)
    stage.arrive("big", 96, family=2, output=30, priority=0)
    stage.step(2)
    before = stage.engine.seam.counts.hits
    stage.arrive("hit", 112, family=1, priority=1)
    stage.step(4)
    asked = stage.engine.seam.counts.hits - before
    stage.settle()
    if stage.engine.seam.counts.hits == 0:
        raise DoesNotApply("the connector promised nothing for a prompt it had seen")
    stage.exercised(asked >= 2, "the promise was not repeated for want of blocks")


def priority_preemption(stage: Stage) -> None:
    """Requests of better priority grow and take the blocks of one scheduled in the same step."""
    for index in range(3):
        stage.arrive(f"low{index}", 15 + 16 * index, family=index, output=30, priority=5 - index)
        stage.step(1)
    stage.arrive("high", 60, family=7, output=30, priority=0)
    stage.settle()
    stage.exercised(stage.engine.counts.preemptions > 0, "nothing was preempted")
    for index in range(3):
        stage.forget()
        stage.arrive(f"again{index}", 15 + 16 * index + 28, shared=99, follows=f"low{index}")
        stage.settle()


def thrash(stage: Stage) -> None:
    """Four requests in memory for two: every few steps one is preempted and resumed."""
    for index in range(4):
        stage.arrive(f"r{index}", 34 + index, family=index, output=70, priority=index)
    stage.settle()
    stage.exercised(stage.engine.counts.preemptions >= 2, "fewer than two preemptions")


def many_loads(stage: Stage) -> None:
    """Everything that waits is kept: loads for more blocks than there are, all at once."""
    for family in range(4):
        stage.warm(112, family=family)
    before = stage.loads
    for family in range(4):
        stage.arrive(f"l{family}", 128 - 4, family=family, shared=112, output=4)
    stage.settle()
    stage.must_load(before)


def evict_and_come_back(stage: Stage) -> None:
    """Prompts in turn, so that the engine's cache loses each before it is asked for again."""
    for turn in range(3):
        for family in range(5):
            stage.arrive(f"t{turn}f{family}", 80, family=family, output=2)
            stage.step(2)
        stage.settle()
    stage.exercised(stage.engine.counts.finished >= 15, "not all turns were played")


def drafts(stage: Stage) -> None:
    """Drafts are computed, rejected and accepted; only settled tokens may be kept."""
    for index in range(3):
        stage.arrive(f"d{index}", 30 + 5 * index, family=index, output=40)
        stage.step(2)
    stage.settle()
    for index in range(3):
        stage.forget()
        stage.arrive(f"again{index}", 30 + 5 * index + 39, shared=99, follows=f"d{index}", output=8)
        stage.settle()


def with_drafts(shape: Shape) -> Shape:
    """Three drafts a step."""
    return replace(shape, drafts=3)


def two_ranks(shape: Shape) -> Shape:
    """Tensor parallel over two ranks in other processes."""
    return replace(shape, ranks=2, executor="multi-process")


def two_stages(shape: Shape) -> Shape:
    """Two pipeline stages with different layers, in other processes."""
    if shape.asynchronous:
        raise DoesNotApply("asynchronous scheduling over pipeline stages is not driven here")
    return replace(shape, stages=2, executor="multi-process")


def lagging(shape: Shape) -> Shape:
    """Workers run a step after the next one was scheduled."""
    if not shape.asynchronous:
        raise DoesNotApply("only under asynchronous scheduling")
    return replace(shape, lag=True, executor="multi-process", blocks=11)


def over_ranks(stage: Stage) -> None:
    """Saves, loads, preemption and aborts, with every rank and stage checked."""
    stage.warm(96)
    before = stage.loads
    for index in range(4):
        stage.arrive(f"r{index}", 96 + index, shared=96 - 10 * index, variant=index, output=6)
        stage.step(1)
    stage.abort("r2", late=True)
    stage.reset(running=True)
    stage.settle()
    stage.forget()
    stage.arrive("again", 96)
    stage.settle()
    stage.must_load(before)


SCENARIOS = (
    Scenario(
        "failed-allocation", "a promise without blocks, asked again", failed_allocation, ten_blocks
    ),
    Scenario(
        "priority-preemption",
        "preempted in the schedule() that gave it blocks",
        priority_preemption,
        nine_blocks_by_priority,
    ),
    Scenario("thrash", "four requests in memory for two", thrash, ten_blocks),
    Scenario("many-loads", "loads for more blocks than there are", many_loads, ten_blocks),
    Scenario("evict", "prompts come back after the engine lost them", evict_and_come_back),
    Scenario("drafts", "drafts accepted and rejected", drafts, with_drafts),
    Scenario("two-ranks", "tensor parallel, two ranks", over_ranks, two_ranks),
    Scenario("two-stages", "pipeline parallel, two stages", over_ranks, two_stages),
    Scenario("lag", "workers one step behind the scheduler", thrash, lagging),
    Scenario("lag-abort", "aborts while workers are one step behind", over_ranks, lagging),
)
