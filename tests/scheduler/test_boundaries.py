"""Where windows and states are kept: the writer's rule, step by step, is the whole prompt's."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from moonstep.groups import Group, GroupKind, kept_boundaries, kept_positions
from moonstep.scheduler.boundaries import Boundaries
from moonstep.scheduler.trail import Trail

WINDOW = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=40)
STATE = Group(1, GroupKind.RECURRENT_STATE, 32, 1, (), hash_tokens=16)


@dataclass
class Prompt:
    num_prompt_tokens: int
    shared_prefix_boundary: int = 0


@given(
    prompt_tokens=st.integers(1, 2000),
    interval=st.sampled_from((0, 32, 128, 500)),
    chunks=st.lists(st.integers(1, 700), min_size=1, max_size=8),
    groups=st.sampled_from(([WINDOW], [STATE], [WINDOW, STATE])),
)
def test_what_the_chunks_of_a_prefill_keep_is_what_its_boundaries_need(
    prompt_tokens: int, interval: int, chunks: list[int], groups: list[Group]
) -> None:
    boundaries = Boundaries.of(groups, interval)
    of_request = boundaries.of_request(Prompt(prompt_tokens))  # type: ignore[arg-type]
    whole = kept_boundaries(groups, prompt_tokens, boundaries.interval_tokens)
    for group in groups:
        kept: list[int] = []
        first, computed = 0, 0
        while computed < prompt_tokens:
            computed = min(prompt_tokens, computed + chunks[len(kept) % len(chunks)])
            stop = computed // group.block_tokens
            kept += boundaries.kept_positions(group, first, stop, of_request)
            first = max(first, stop)
        last = prompt_tokens // group.block_tokens
        needed = [p for p in kept_positions(group, whole) if p < last]
        beyond = [p for p in kept if p not in needed]
        assert [p for p in kept if p in needed] == needed
        # Blocks near the end may belong to an interval's end that the prompt does not reach.
        interval_end = -(-prompt_tokens // (boundaries.interval_tokens or 1))
        ahead = interval_end * boundaries.interval_tokens
        assert set(beyond) <= set(kept_positions(group, [ahead])) if interval else not beyond


def test_a_boundary_where_prefixes_part_is_kept() -> None:
    boundaries = Boundaries.of([WINDOW], 0)
    prompt = Prompt(200, shared_prefix_boundary=100)
    assert boundaries.of_request(prompt) == (96, 192)  # type: ignore[arg-type]
    assert boundaries.of_request(Prompt(192)) == (176, 192)  # type: ignore[arg-type]
    assert boundaries.of_request(Prompt(9)) == ()  # type: ignore[arg-type]


def test_a_trail_lets_go_of_what_its_last_boundaries_do_not_need() -> None:
    trail = Trail((), 0)
    trail.passing[0].extend(range(6))
    trail.reach(96)
    assert trail.left_behind(WINDOW) == []  # it may still have to come back to where it began
    trail.reach(112)
    assert trail.left_behind(WINDOW) == [0, 1, 2]  # 96 needs 3, 4 and 5
    trail.reach(112)
    trail.reach(100)
    assert trail.left_behind(WINDOW) == []
    assert trail.let_go(WINDOW) == [3]


def test_a_block_that_is_passed_by_again_keeps_its_place() -> None:
    """Its capture had failed, or it was evicted, and others have come in between."""
    trail = Trail((), 0)
    for position in (0, 1, 2, 1, 4, 3, 0):
        trail.pass_by(0, position)
    trail.reach(96)
    trail.reach(112)
    assert trail.left_behind(WINDOW) == [0, 1, 2]
    assert list(trail.passing[0]) == [3, 4]
