"""The joint boundary: the vectorised rules say what the rule of needs says, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonstep.groups import (
    Group,
    GroupKind,
    Presence,
    hit_blocks,
    joint_hit_tokens,
    needed_blocks,
    resumable,
)
from tests.groups.strategies import MOST_UNITS, UNIT, group_sets, groups, presences

LIMITS = st.integers(0, MOST_UNITS * UNIT + 5)


def has(presence: Presence, position: int) -> bool:
    return position < len(presence.blocks) and bool(presence.blocks[position])


def plain_hit(presences_: Sequence[Presence], limit_tokens: int, align_tokens: int) -> int:
    """Boundary by boundary, block by block."""
    return max(
        boundary
        for boundary in range(0, limit_tokens + 1, align_tokens)
        if all(has(p, i) for p in presences_ for i in hit_blocks(p.group, boundary))
    )


@given(st.data(), groups(), LIMITS)
def test_a_group_resumes_where_the_blocks_of_a_hit_are_present(
    data: st.DataObject, group: Group, limit_tokens: int
) -> None:
    presence = data.draw(presences(group))
    align_tokens = group.block_tokens * data.draw(st.integers(1, 3))
    found = resumable(presence, limit_tokens, align_tokens)
    for number, resumes in enumerate(found.tolist()):
        blocks = hit_blocks(group, number * align_tokens)
        assert resumes == all(has(presence, position) for position in blocks)
    assert len(found) == limit_tokens // align_tokens + 1


@given(st.data(), group_sets(), LIMITS)
def test_the_joint_hit_is_the_highest_boundary_of_all_groups(
    data: st.DataObject, set_: tuple[Group, ...], limit_tokens: int
) -> None:
    found = [data.draw(presences(group)) for group in set_]
    align_tokens = math.lcm(*(group.block_tokens for group in set_))
    assert joint_hit_tokens(found, limit_tokens, align_tokens) == plain_hit(
        found, limit_tokens, align_tokens
    )


@given(st.data(), group_sets(), LIMITS)
def test_what_the_engine_has_counts_as_present(
    data: st.DataObject, set_: tuple[Group, ...], limit_tokens: int
) -> None:
    """... and only that: above it, the answer is that of a cache that has it too."""
    found = [data.draw(presences(group)) for group in set_]
    align_tokens = math.lcm(*(group.block_tokens for group in set_))
    local_tokens = data.draw(st.integers(0, limit_tokens // align_tokens)) * align_tokens
    both = [_and_first(p, local_tokens) for p in found]
    hit = joint_hit_tokens(found, limit_tokens, align_tokens, local_tokens)
    assert hit == max(local_tokens, plain_hit(both, limit_tokens, align_tokens))


@given(st.data(), group_sets(), LIMITS)
def test_more_presence_never_shortens_a_hit(
    data: st.DataObject, set_: tuple[Group, ...], limit_tokens: int
) -> None:
    found = [data.draw(presences(group)) for group in set_]
    align_tokens = math.lcm(*(group.block_tokens for group in set_))
    more = [replace(p, blocks=p.blocks | data.draw(presences_like(len(p.blocks)))) for p in found]
    assert joint_hit_tokens(more, limit_tokens, align_tokens) >= joint_hit_tokens(
        found, limit_tokens, align_tokens
    )


def presences_like(count: int) -> st.SearchStrategy[np.ndarray]:
    bits = st.lists(st.booleans(), min_size=count, max_size=count)
    return bits.map(lambda values: np.array(values, dtype=np.bool_))


@given(groups(), st.integers(0, MOST_UNITS * UNIT))
def test_a_resume_reads_exactly_the_tokens_its_kind_needs(group: Group, boundary: int) -> None:
    boundary -= boundary % group.block_tokens
    if group.kind is GroupKind.FULL_ATTENTION:
        first = 0
    elif group.kind is GroupKind.SLIDING_WINDOW:
        first = max(0, boundary - (group.window_tokens - 1))
    else:
        first = boundary - 1
    tokens = range(first, boundary) if boundary else range(0)
    blocks = sorted({token // group.block_tokens for token in tokens})
    assert list(needed_blocks(group, boundary)) == blocks


@given(groups(), st.integers(1, MOST_UNITS))
def test_a_hit_needs_what_is_read_and_the_proof(group: Group, blocks: int) -> None:
    needed = needed_blocks(group, blocks * group.block_tokens)
    wanted = hit_blocks(group, blocks * group.block_tokens)
    proves = group.draft and group.kind is not GroupKind.RECURRENT_STATE
    assert list(wanted) == [*needed, *([needed.stop] if proves else [])]
    assert len(needed) <= max(group.window_blocks, 1) or group.kind is GroupKind.FULL_ATTENTION


def test_a_boundary_inside_a_block_includes_the_block() -> None:
    full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, (), hash_tokens=4)
    state = replace(full, kind=GroupKind.RECURRENT_STATE)
    assert needed_blocks(full, 36) == range(3)
    assert needed_blocks(state, 36) == range(2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hash_tokens": 3},
        {"window_tokens": 8},
        {"kind": GroupKind.SLIDING_WINDOW},
        {"kind": GroupKind.SLIDING_WINDOW, "window_tokens": 1},
        {"kind": GroupKind.RECURRENT_STATE, "window_tokens": 8},
    ],
)
def test_a_group_that_does_not_fit_itself_is_refused(wrong: dict[str, object]) -> None:
    group = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    with pytest.raises(ValueError, match="tokens"):
        replace(group, **wrong)


def _and_first(presence: Presence, tokens: int) -> Presence:
    """``presence`` with everything up to ``tokens``, the state there included."""
    count = tokens // presence.group.block_tokens
    rest = presence.blocks[count:]
    return replace(presence, blocks=np.concatenate([np.ones(count, dtype=np.bool_), rest]))
