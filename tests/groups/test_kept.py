"""What is kept of a prompt is what hits can use, no block more: writer and reader agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from moonstep.groups import (
    Group,
    GroupKind,
    Presence,
    alignment_tokens,
    hit_blocks,
    joint_hit_tokens,
    kept_boundaries,
    kept_positions,
    reachable_tokens,
    replay_boundaries,
)
from tests.groups.strategies import UNIT, group_sets

PROMPTS = st.integers(1, 60 * UNIT)


def kept(groups_: Sequence[Group], num_tokens: int, interval_tokens: int) -> list[Presence]:
    """A cache that a prompt of ``num_tokens`` went through, and nothing else."""
    boundaries = kept_boundaries(groups_, num_tokens, interval_tokens)
    found = []
    for group in groups_:
        blocks = np.zeros(num_tokens // group.block_tokens, dtype=np.bool_)
        blocks[kept_positions(group, boundaries)] = True
        found.append(Presence(group, blocks))
    return found


@given(st.data(), group_sets(), PROMPTS)
def test_a_prompt_sent_again_hits_as_if_everything_were_kept(
    data: st.DataObject, set_: tuple[Group, ...], num_tokens: int
) -> None:
    align = alignment_tokens(set_)
    interval = align * data.draw(st.integers(0, 3))
    resend, extension = replay_boundaries(set_, num_tokens)
    whole = [Presence(g, np.ones(num_tokens // g.block_tokens, dtype=np.bool_)) for g in set_]
    for limit, boundary in ((num_tokens - 1, resend), (num_tokens + align, extension)):
        assert joint_hit_tokens(whole, limit, align) == boundary
        assert joint_hit_tokens(kept(set_, num_tokens, interval), limit, align) == boundary


@given(st.data(), group_sets(), PROMPTS)
def test_a_prompt_that_diverges_loses_at_most_an_interval(
    data: st.DataObject, set_: tuple[Group, ...], num_tokens: int
) -> None:
    align = alignment_tokens(set_)
    interval = align * data.draw(st.integers(1, 4))
    same_tokens = data.draw(st.integers(0, num_tokens))
    cut = [
        Presence(p.group, p.blocks[: same_tokens // p.group.block_tokens])
        for p in kept(set_, num_tokens, interval)
    ]
    best = reachable_tokens(set_, same_tokens, num_tokens)
    assert best - interval < joint_hit_tokens(cut, num_tokens + align, align) <= best


@given(st.data(), group_sets(), PROMPTS)
def test_no_block_is_kept_that_no_hit_needs(
    data: st.DataObject, set_: tuple[Group, ...], num_tokens: int
) -> None:
    """Take any one block away, and some boundary that was kept is lost."""
    align = alignment_tokens(set_)
    interval = align * data.draw(st.integers(0, 3))
    boundaries = kept_boundaries(set_, num_tokens, interval)
    assume(boundaries)
    group = data.draw(st.sampled_from(set_))
    for position in kept_positions(group, boundaries):
        assert any(position in hit_blocks(group, boundary) for boundary in boundaries)


def test_windows_of_a_long_prompt_take_a_third_of_the_memory() -> None:
    """Five window layers beside each full one: four windows of 1,024 tokens and one block each."""
    full = Group(0, GroupKind.FULL_ATTENTION, 16, 1000, ())
    windows = [
        Group(index, GroupKind.SLIDING_WINDOW, 16, 1000, (), window_tokens=1024)
        for index in range(1, 6)
    ]
    set_ = [full, *windows]
    boundaries = kept_boundaries(set_, 32_768, 8_192)
    blocks = sum(len(kept_positions(group, boundaries)) for group in set_)
    assert blocks == 2048 + 5 * (4 * 64 + 1) <= 0.35 * 6 * 2048
