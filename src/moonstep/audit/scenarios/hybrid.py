"""Hybrid: several groups, windows, recurrent state, blocks of unequal size."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moonstep.audit import checks, connectors, reach
from moonstep.audit.findings import Kind
from moonstep.audit.groupsets import block_tokens, scheduler_block_tokens
from moonstep.audit.scenarios.stage import DoesNotApply, Scenario
from moonstep.audit.shape import lengthened

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonstep.audit.scenarios.stage import Stage
    from moonstep.audit.shape import Drafter, Shape

    Adapt = Callable[[Shape], Shape]


IN_TIME_S = 0.1
"""Within which a connector must not have lost its patience with a store."""


def ask(stage: Stage, name: str, tokens: int, computed: int = 0, **facts: Any) -> None:
    """Send a prompt that the engine has lost; what is kept has to be promised, whole.

    With `computed`, so many of its tokens were a prompt before, and it has to be kept that far.
    What a store has may come too late when the machine is busy: then nothing is asked of it.
    """
    engine = stage.engine
    over_store = connectors.store_of(engine.scheduler.connector) is not None
    if over_store and engine.inspector is not None:
        checks.wait_until_idle(engine, engine.inspector)  # what is on its way there arrives
    before, loads = engine.seam.counts.loaded_tokens, stage.loads
    stage.arrive(name, tokens, **facts)
    request = engine.scheduler.requests[name]
    kept = reach.boundaries(engine, request.block_hashes, request.num_tokens - 1)
    arrived_s = time.monotonic()
    stage.settle()
    is_late = over_store and time.monotonic() - arrived_s > IN_TIME_S
    loaded = engine.seam.counts.loaded_tokens - before
    if engine.inspector is None:
        stage.must_load(loads)
        return
    highest, wanted = max(kept, default=0), reach.highest(engine, computed, tokens)
    if highest < wanted:
        detail = f"{tokens} tokens, computed before: {highest} can be gone on from, not {wanted}"
        engine.report(Kind.UNUSED, detail, name)
    if loaded < highest and not is_late:
        detail = f"{highest} of {tokens} tokens are kept in every group, {loaded} were promised"
        engine.report(Kind.UNUSED, detail, name)


def round_trip(stage: Stage) -> None:
    """Prompts around block ends, sent again and extended once the engine has lost them.

    With the same prompt the last token has to be computed, an extension needs none of it. The very
    first prompt is not asked for: in the first step no worker has said yet what it has room for.
    """
    unit = stage.engine.unit_tokens
    stage.warm(unit, family=99)
    for extra in (0, 1, unit - 1):
        count = 3 * unit + extra
        stage.warm(count, family=extra + 1)
        ask(stage, f"again{extra}", count, count, family=extra + 1)
        stage.forget()
        ask(stage, f"more{extra}", count + 5, count, family=extra + 1, shared=count)
        stage.forget()


def answered(stage: Stage) -> None:
    """Prompts whose answers were so long that the window has moved on, sent again.

    Where a prompt can be resumed from is kept, however far its request goes on.
    """
    unit = stage.engine.unit_tokens
    stage.warm(unit, family=99)
    for extra in (0, 1):
        count = 3 * unit + extra
        stage.warm(count, family=extra + 1, output=3 * unit)
        ask(stage, f"again{extra}", count, count, family=extra + 1)
        stage.forget()


def long_prompt(stage: Stage) -> None:
    """A prompt in small chunks beside others: blocks leave the window while it is computed."""
    count = stage.shape.max_tokens - 9
    stage.arrive("long", count, family=1, output=4)
    stage.arrive("other", 40, family=2, output=24)
    stage.settle()
    stage.forget()
    ask(stage, "again", count, count, family=1)
    stage.forget()
    ask(stage, "other-again", 40, 40, family=2)


def turns(stage: Stage) -> None:
    """A chat: what was decoded is asked for again, and the engine has lost it each time."""
    stage.arrive("turn0", 30, output=26)
    stage.settle()
    for turn in range(1, 4):
        stage.forget()
        tokens = 40 + 24 * turn
        ask(stage, f"turn{turn}", tokens, output=10, shared=tokens, follows=f"turn{turn - 1}")


def come_and_go(stage: Stage) -> None:
    """Requests are preempted with blocks that have left their windows, and resumed from kept ones.

    The table of a resumed request begins with null blocks, and its blocks are others.
    """
    for index in range(3):
        stage.arrive(f"r{index}", 52 + 8 * index, family=index, output=50, priority=index)
    for _ in range(5):
        stage.step(6)
        stage.reset(running=True)
    stage.settle()
    stage.exercised(stage.engine.counts.resumes >= 3, "fewer than three were resumed")
    for index in range(3):
        stage.forget()
        stage.arrive(f"t{index}", 52 + 8 * index + 44, shared=128, follows=f"r{index}")
        stage.settle()


def drafts_across_boundaries(stage: Stage) -> None:
    """Drafts are accepted and rejected around block ends; what they wrote must not be kept."""
    for index in range(4):
        stage.arrive(f"d{index}", 27 + index, family=index, output=40)
    stage.settle()
    for index in range(4):
        stage.forget()
        stage.arrive(f"e{index}", 27 + index + 38, shared=99, follows=f"d{index}", output=6)
        stage.settle()


def evicted_in_part(stage: Stage) -> None:
    """Eight long prompts in turn, twice: each is lost before it comes again."""
    for turn in range(2):
        for family in range(8):
            stage.arrive(f"t{turn}f{family}", 96 + family, family=family, output=2)
            stage.settle()
            stage.forget()
    stage.exercised(stage.engine.counts.finished >= 16, "not all prompts were computed")


def of_block(tokens: int) -> Adapt:
    """An engine with blocks of so many tokens, and room for as many blocks."""

    def adapt(shape: Shape) -> Shape:
        times = tokens // shape.block_tokens
        return replace(
            shape,
            block_tokens=tokens,
            max_tokens=times * shape.max_tokens,
            budget_tokens=times * shape.budget_tokens,
            window_tokens=times * shape.window_tokens,
        )

    return adapt


def longer(place: int) -> Adapt:
    """The blocks of one of the kinds are twice as long as the others'."""

    def regroup(shape: Shape) -> Shape:
        kinds = list(dict.fromkeys(shape.kinds))
        if len(kinds) <= max(place, 1):
            raise DoesNotApply("no such kind of group beside others")
        if kinds[place] == "state":
            raise DoesNotApply("vLLM goes wrong by itself where blocks of states are longer")
        return lengthened(shape, kinds[place])

    return regroup


def small_budget(shape: Shape) -> Shape:
    """Chunks of 48 tokens."""
    return replace(shape, budget_tokens=48)


def draft_three(shape: Shape) -> Shape:
    """Three drafts a step."""
    return replace(shape, drafts=3)


def wide_window(shape: Shape) -> Shape:
    """A window of more than two of its blocks, which ends inside one."""
    if "window" not in shape.kinds:
        raise DoesNotApply("no windows")
    return replace(shape, window_tokens=2 * block_tokens(shape, "window") + 3)


def every_interval(shape: Shape) -> Shape:
    """The engine itself keeps windows and states at the end of every second (longest) block."""
    if len(shape.kinds) == 1:
        raise DoesNotApply("one group only")
    return replace(shape, interval_tokens=2 * scheduler_block_tokens(shape))


def one_head_two_ranks(shape: Shape) -> Shape:
    """Two ranks with copies of one head, and states of their own."""
    return replace(shape, heads=1, ranks=2, executor="multi-process")


def drafter(name: Drafter) -> Adapt:
    """Two drafts a step, by a drafter that has a layer of its own."""

    def regroup(shape: Shape) -> Shape:
        with_it = replace(shape, drafts=2, drafter=name, blocks=2 * shape.blocks)
        return replace(with_it, blocks=with_it.group_count * (shape.blocks + 1))

    return regroup


SCENARIOS = (
    Scenario("round-trip", "prompts sent again and extended", round_trip),
    Scenario("round-trip-32", "the same in blocks of 32 tokens", round_trip, of_block(32), "9"),
    Scenario("round-trip-64", "the same in blocks of 64 tokens", round_trip, of_block(64), "9"),
    Scenario(
        "round-trip-wide",
        "the same with windows of several blocks",
        round_trip,
        regroup=wide_window,
    ),
    Scenario("round-trip-drafts", "the same with drafts", round_trip, draft_three, "9"),
    *(
        Scenario(
            f"round-trip-unequal-{place}",
            f"the same, blocks of the kind at place {place} twice as long",
            round_trip,
            case="9",
            regroup=longer(place),
        )
        for place in range(3)
    ),
    Scenario(
        "round-trip-interval",
        "the same where the engine keeps states and windows",
        round_trip,
        regroup=every_interval,
    ),
    Scenario(
        "round-trip-eagle",
        "the same with a drafter in every group",
        round_trip,
        case="9",
        regroup=drafter("eagle"),
    ),
    Scenario(
        "round-trip-mtp",
        "the same with a drafter in one group",
        round_trip,
        case="9",
        regroup=drafter("mtp"),
    ),
    Scenario("answered", "prompts sent again after long answers", answered),
    Scenario("long-prompt", "blocks leave their window in the prefill", long_prompt, small_budget),
    Scenario("turns", "a chat whose answers are asked for again", turns),
    Scenario("come-and-go", "preempted and resumed beyond the window", come_and_go),
    Scenario("drafts-at-ends", "drafts around block ends", drafts_across_boundaries, draft_three),
    Scenario("evicted-in-part", "long prompts in turn, each lost by the engine", evicted_in_part),
    Scenario(
        "copies-of-heads", "copied heads beside states of each rank", round_trip, one_head_two_ranks
    ),
)
