"""Lives: preemption, resumption, aborts, ids used again, sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moonstep.audit.scenarios.stage import DoesNotApply, Scenario

if TYPE_CHECKING:
    from moonstep.audit.scenarios.stage import Stage
    from moonstep.audit.shape import Shape


def tight(shape: Shape) -> Shape:
    """Memory for ten blocks: two requests of 112 tokens do not fit together."""
    return replace(shape, blocks=11, seats=2)


def resume(stage: Stage) -> None:
    """R decodes into its fifth block, is preempted, S takes its blocks, R comes back."""
    stage.arrive("S", 64, family=1, output=48, priority=1)
    stage.step(2)
    stage.arrive("R", 64, family=2, output=48, priority=2)
    preempted = stage.engine.counts
    stage.until(lambda: preempted.preemptions > 0, "nothing was preempted")
    stage.exercised(stage.engine.scheduler.requests["R"].num_output_tokens >= 1, "R had no output")
    stage.until(lambda: preempted.resumes > 0, "R was not resumed")
    stage.settle()
    stage.forget()
    stage.arrive("T", 112, family=2, shared=112, follows="R")
    stage.settle()


def resume_by_reset(stage: Stage) -> None:
    """A reset preempts running requests; they are matched and admitted again in the next step."""
    for index in range(3):
        stage.arrive(f"r{index}", 40 + 8 * index, family=index, output=24)
    stage.step(8)
    resets = stage.engine.counts
    before = resets.resumes
    stage.reset(running=True)
    stage.exercised(
        bool(stage.engine.scheduler.reset_preempted_req_ids), "the reset preempted nothing"
    )
    stage.step(4)
    stage.exercised(resets.resumes > before, "nothing was resumed")
    stage.settle()


def resume_many_times(stage: Stage) -> None:
    """One request is preempted by a reset after every few tokens of its output."""
    stage.arrive("R", 50, output=40)
    for _ in range(8):
        stage.step(5)
        stage.reset(running=True)
    stage.exercised(stage.engine.counts.preemptions >= 4, "fewer than four preemptions")
    stage.settle()
    stage.arrive("T", 90, follows="R", shared=90)
    stage.settle()


def finish_in_the_same_step(stage: Stage) -> None:
    """Requests whose only token comes from the step that admits them, with and without a load."""
    stage.warm(64)
    for index in range(3):
        stage.arrive(f"r{index}", 64 + index, shared=64, variant=index)
    before = stage.loads
    stage.settle()
    stage.must_load(before)


def reuse_an_id(stage: Stage) -> None:
    """An id comes back with another prompt: after an end, after an abort, while it waits."""
    stage.arrive("x", 48, family=1, output=4)
    stage.settle()
    stage.arrive("x", 48, family=2, output=4)
    stage.step(2)
    stage.abort("x")
    stage.step(1)
    stage.arrive("x", 64, family=3, output=4)
    stage.abort("x")
    stage.arrive("x", 64, family=4, output=4)
    stage.settle()
    for family in range(1, 5):
        stage.forget()
        stage.arrive("x", 64, family=family)
        stage.settle()


def abort_everywhere(stage: Stage) -> None:
    """A request is aborted after each number of steps, before and in a step; then asked again."""
    for steps in range(10):
        for late in (False, True):
            name = f"a{steps}{late}"
            stage.arrive(name, 80, family=steps % 3, output=6)
            stage.step(steps)
            stage.abort(name, late)
            stage.step(1)
            stage.arrive(f"{name}-again", 80, family=steps % 3)
            stage.settle()
            stage.forget()
    stage.exercised(stage.engine.counts.aborted >= 10, "too few aborts came in time")


def abort_before_allocation(stage: Stage) -> None:
    """Requests that wait for a seat, or for a lookup, are aborted; then the same prompt and id."""
    stage.warm(96, family=5)
    for index in range(4):
        stage.arrive(f"busy{index}", 32, family=index, output=20)
    stage.step(2)
    stage.arrive("w", 96, family=5)
    stage.step(1)
    stage.abort("w")
    stage.arrive("w", 96, family=5)
    stage.abort("w", late=True)
    stage.step(2)
    stage.arrive("w", 96, family=5)
    stage.settle()
    stage.arrive("v", 96, family=5)
    stage.abort("v")
    stage.settle()
    stage.exercised(stage.engine.counts.aborted >= 2, "the aborts came too late")


def abort_while_loading(stage: Stage) -> None:
    """Abort in each step of a load, a hundred times; capacity stays what it was."""
    stage.warm(96)
    before = stage.loads
    for index in range(100):
        stage.arrive(f"l{index}", 96)
        stage.step(index % 4)
        stage.abort(f"l{index}", late=index % 3 == 0)
        stage.settle()
        stage.forget()
    stage.must_load(before)


def ask_again_while_saving(stage: Stage) -> None:
    """The same prompt comes again in every step in which its blocks may still be on their way."""
    for index in range(6):
        stage.arrive(f"r{index}", 64, output=3)
        stage.step(1)
    stage.settle()
    stage.forget()
    stage.arrive("last", 64)
    stage.settle()


def session(stage: Stage) -> None:
    """Streaming sessions: the id comes back among the new requests, with tokens computed."""
    if stage.shape.drafts:
        raise DoesNotApply("vLLM's scheduler asserts for sessions with drafts")
    for name, family in (("s", 1), ("t", 2)):
        stage.arrive(name, 20, family=family, output=5, streaming=True)
    stage.step(4)
    for turn in range(3):
        stage.extend("s", 15, output=3, variant=turn)
        stage.extend("t", 7, output=2, variant=turn)
        stage.step(4)
        stage.arrive(f"other{turn}", 64, family=3 + turn)
        stage.step(3)
    stage.close("s")
    stage.close("t")
    stage.settle()
    stage.exercised(stage.output_tokens("s") >= 8, "the session had fewer than two turns")


def session_under_reset(stage: Stage) -> None:
    """A session is preempted by a reset between and within its turns."""
    if stage.shape.drafts:
        raise DoesNotApply("vLLM's scheduler asserts for sessions with drafts")
    stage.arrive("s", 40, output=6, streaming=True)
    stage.step(3)
    stage.reset(running=True)
    stage.step(3)
    stage.extend("s", 20, output=6)
    stage.step(3)
    stage.reset(running=True)
    stage.step(2)
    stage.close("s")
    stage.settle()
    stage.arrive("t", 40)
    stage.settle()


SCENARIOS = (
    Scenario("resume", "preempted by memory pressure, resumed", resume, tight, case="1"),
    Scenario("resume-by-reset", "preempted by a reset, re-admitted in one step", resume_by_reset),
    Scenario("resume-many-times", "one request preempted again and again", resume_many_times),
    Scenario(
        "finish-same-step", "admitted, loaded and finished in one step", finish_in_the_same_step
    ),
    Scenario("id-reuse", "an id ends and comes back", reuse_an_id),
    Scenario("abort-everywhere", "abort after every number of steps", abort_everywhere, case="5"),
    Scenario(
        "abort-before-allocation",
        "abort while waiting for a seat or a lookup",
        abort_before_allocation,
        case="6",
    ),
    Scenario(
        "abort-while-loading", "abort during a load, 100 times", abort_while_loading, case="5"
    ),
    Scenario(
        "ask-while-saving", "the same prompt while it is saved", ask_again_while_saving, case="4"
    ),
    Scenario("session", "streaming sessions", session),
    Scenario("session-reset", "a streaming session under resets", session_under_reset),
)
