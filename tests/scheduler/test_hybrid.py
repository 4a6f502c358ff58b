"""Windows and states in the real scheduler: what is kept, what comes back, what is given up.

The audit's engine under it compares every byte that is read or kept with an oracle.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from moonstep.audit.driver import random_history
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive, Reset, Step
from moonstep.audit.shape import Shape
from moonstep.groups import GroupKind, block_names, kept_boundaries, kept_positions
from tests.scheduler.engine import Watched, open_engine
from tests.scheduler.test_histories import settings_of

BASE: dict[str, Any] = {"blocks": 90, "max_tokens": 96, "budget_tokens": 16}
WINDOWS = [
    Shape(groups="full+window", **BASE),
    Shape(groups="window", **BASE),
    Shape(groups="full+window+window", **{**BASE, "blocks": 120}),
    Shape(groups="full+window", runner="v2", asynchronous=True, **BASE),
    Shape(groups="full+window", longer="full", **BASE),
    Shape(groups="full+window", longer="window", **BASE),
]
STATES = [
    Shape(groups="full+state", **BASE),
    Shape(groups="full+state", runner="v2", asynchronous=True, **BASE),
    Shape(groups="full+window+state", **{**BASE, "blocks": 120}),
]

CAPTURE = pytest.mark.parametrize("capture", ["eager", "lazy"])
# A window's blocks hardly ever push others out of the engine, so lazy keeps few while it is young.
LASTING = [s for s in WINDOWS if s.groups != "window"]


def align_of(shape: Shape) -> int:
    return shape.block_tokens * (2 if shape.longer else 1)


@CAPTURE
@pytest.mark.parametrize("shape", LASTING + STATES, ids=Shape.label)
@pytest.mark.parametrize("tokens", [41, 40, 48, 9, 64])
def test_a_prompt_sent_again_is_restored_up_to_its_last_boundary(
    shape: Shape, capture: str, tokens: int
) -> None:
    with open_engine(shape, capture=capture) as watched:
        watched.run(id="a", family=1, tokens=tokens, shared=tokens)
        push_out(watched)
        restored = watched.run(id="b", family=1, tokens=tokens, shared=tokens)
        assert restored == (tokens - 1) // align_of(shape) * align_of(shape)


@CAPTURE
@pytest.mark.parametrize("shape", LASTING, ids=Shape.label)
@pytest.mark.parametrize(("tokens", "output"), [(40, 1), (30, 21), (17, 40)])
def test_a_longer_prompt_goes_on_from_the_end_of_the_answer(
    shape: Shape, capture: str, tokens: int, output: int
) -> None:
    with open_engine(shape, capture=capture) as watched:
        watched.run(id="a", family=1, tokens=tokens, shared=tokens, output=output)
        push_out(watched)
        again = tokens + output + 9
        restored = watched.run(id="b", family=1, tokens=again, shared=tokens + output, follows="a")
        assert restored == (tokens + output - 1) // align_of(shape) * align_of(shape)


@CAPTURE
@pytest.mark.parametrize("shape", WINDOWS + STATES, ids=Shape.label)
def test_one_that_parts_from_a_prompt_loses_an_interval_at_most(shape: Shape, capture: str) -> None:
    with open_engine(shape, capture=capture, retention_interval=24) as watched:
        watched.run(id="a", family=1, tokens=90, shared=90)
        push_out(watched)
        restored = watched.run(id="b", family=1, tokens=90, shared=70, variant=7)
        if "state" in shape.groups:
            assert restored == 0  # the engine hands over no state in between
        else:
            assert restored == 48


@pytest.mark.parametrize("shape", [s for s in WINDOWS if not s.longer], ids=Shape.label)
@pytest.mark.parametrize(("tokens", "output"), [(40, 1), (30, 21), (17, 60), (64, 2)])
def test_only_what_a_later_hit_can_use_stays(shape: Shape, tokens: int, output: int) -> None:
    """The writer's slots, against the reader's rule."""
    with open_engine(shape, retention_interval=24) as watched:
        arrival = Arrive("a", 1, tokens, tokens, output=output)
        watched.apply(arrival)
        request = watched.engine.scheduler.requests["a"]
        watched.settle()
        half = watched.half
        end = (request.num_tokens - 1) // 4 * 4
        for group in half._groups:
            names = block_names(request.block_hashes, group)
            kept = {p for p, name in enumerate(names) if half.index.holds(group.index, name)}
            boundaries = {*kept_boundaries(half._groups, tokens, 24), *range(24, end + 1, 24), end}
            needed = set(kept_positions(group, sorted(boundaries)))
            ahead = set(kept_positions(group, [-(-end // 24) * 24]))
            assert needed <= kept | {p for p in needed if p >= end // 4}
            if group.kind is GroupKind.SLIDING_WINDOW:
                # A block before the last window stays until the one behind it is sure to be there.
                before = set(kept_positions(group, [max(end - 4, 0), max(end - 8, 0)]))
                assert kept <= needed | ahead | before
        assert not half.index._passing


@pytest.mark.parametrize(
    "shape", [s for s in WINDOWS + STATES if not s.asynchronous], ids=Shape.label
)
def test_a_preempted_request_comes_back_to_where_it_was(shape: Shape) -> None:
    with open_engine(shape) as watched:
        watched.apply(Arrive("a", 1, 37, 37, output=40), Step(20))
        before = watched.engine.seam.counts.loaded_tokens
        computed = watched.engine.scheduler.requests["a"].num_computed_tokens
        watched.apply(Reset(running=True))
        watched.settle()
        restored = watched.engine.seam.counts.loaded_tokens - before
        align = align_of(shape)
        if "state" in shape.groups:
            assert restored == 36 // align * align  # no states are handed over in decode
        else:
            assert restored >= computed // align * align - align


def test_what_a_request_gives_up_at_its_end_may_have_been_promised_in_that_step() -> None:
    """B is promised what lies just behind the window that A ends on, and which A lets go of."""
    with open_engine(Shape(groups="full+window", **BASE)) as watched:
        watched.apply(Arrive("a", 1, 17, 17, output=40))
        while "a" in watched.engine.scheduler.requests:
            watched.engine.step()
        assert "a" in watched.half.lives  # its life ends with the step that admits B
        assert watched.run(id="b", family=1, tokens=50, shared=50, follows="a") == 48 - 16


@CAPTURE
@pytest.mark.parametrize("interval", [None, 4])
@pytest.mark.parametrize("shape", STATES, ids=Shape.label)
def test_states_of_decode_come_back_where_the_engine_hands_them_over(
    shape: Shape, interval: int | None, capture: str
) -> None:
    shape = replace(shape, interval_tokens=interval)
    with open_engine(shape, capture=capture) as watched:
        watched.run(id="a", family=1, tokens=30, shared=30, output=21)
        push_out(watched)
        restored = watched.run(id="b", family=1, tokens=70, shared=51, follows="a")
        assert restored >= 44
        states = [g for g in watched.half._groups if g.kind is GroupKind.RECURRENT_STATE]
        kept = len(watched.half.index.written(states[0].index))
        assert kept <= 8  # two for each request and boundary, not one for each block


def push_out(watched: Watched) -> None:
    """The engine forgets what it has cached: what comes now, comes from the host cache.

    In lazy mode a block is kept when the engine is about to lose it, so others push it out.
    """
    if watched.half._mode.value == "lazy":
        for number in range(6):
            watched.run(id=f"push{number}", family=100 + number, tokens=90, shared=90)
    watched.apply(Reset())


GROUP_SETS = [
    "full+window",
    "window",
    "full+state",
    "mla",
    "full+window+state",
    "full+window+window",
]


@pytest.mark.parametrize("groups", GROUP_SETS)
@pytest.mark.parametrize("seed", range(2000, 2006))
def test_tables_books_and_bytes_are_right_in_any_history(groups: str, seed: int) -> None:
    shape, events = random_history(seed, steps=90, groups=groups)
    drafts = 0 if "state" in groups else shape.drafts  # drafters with layers are refused
    shape = replace(shape, drafter="ngram", drafts=drafts)
    unit = block_bytes(shape) // shape.ranks
    rng = random.Random(seed)
    extra: dict[str, Any] = {"retention_interval": rng.choice((0, 8, 8192))}
    with open_engine(shape, **settings_of(seed, unit), **extra) as watched:
        watched.apply(*events)
