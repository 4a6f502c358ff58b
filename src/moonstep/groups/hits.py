"""From which blocks are present to the boundaries at which a request can resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moonstep.groups.group import Group, GroupKind


@dataclass(frozen=True, slots=True)
class Presence:
    """Which blocks of a request one group has.

    ``blocks[i]`` says that the block at position ``i`` of the request's table is present under its
    name; positions beyond the array are absent. With drafts the array has to go on beyond the
    limit of the hit, as far as the request is hashed. ``tails[k]``, where the engine's hits may end
    inside a block, says that what ends after ``k + 1`` hash units is present as an unfinished
    block, or as a state.
    """

    group: Group
    blocks: NDArray[np.bool_]
    tails: NDArray[np.bool_] | None = None


def resumable(presence: Presence, limit_tokens: int, align_tokens: int) -> NDArray[np.bool_]:
    """At which of the boundaries 0, ``align_tokens``, ... up to ``limit_tokens`` a group resumes.

    ``align_tokens`` is a multiple of the group's block, or, where hits may end inside a block, the
    hash unit. The boundary 0 is always one.

    >>> window = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
    >>> blocks = np.array([False, True, True, True, False])
    >>> resumable(Presence(window, blocks), 80, 16).tolist()
    [True, False, False, True, True, False]
    """
    limit_tokens = max(limit_tokens, 0)
    boundaries = np.arange(0, limit_tokens + 1, align_tokens)
    rule = _RULES[presence.group.kind]
    found = rule(presence, boundaries, align_tokens, limit_tokens)
    found[0] = True
    return found


def _full_attention(
    presence: Presence, boundaries: NDArray[np.int_], align_tokens: int, limit_tokens: int
) -> NDArray[np.bool_]:
    """All blocks up to the boundary, and the proof behind them."""
    group = presence.group
    proof_tokens = group.proof_blocks * min(align_tokens, group.block_tokens)
    run_tokens = _run_tokens(presence, limit_tokens + proof_tokens)
    return boundaries <= run_tokens - proof_tokens


def _run_tokens(presence: Presence, stop_tokens: int) -> int:
    """How far a group is present without a gap, the unfinished block at the end included."""
    group = presence.group
    blocks = presence.blocks[: stop_tokens // group.block_tokens]
    run = len(blocks) if blocks.all() else int(blocks.argmin())
    if presence.tails is not None:
        first, stop = run * group.units, stop_tokens // group.hash_tokens
        ends = np.flatnonzero(presence.tails[first : min(first + group.units - 1, stop)])
        if ends.size:
            return (first + int(ends[-1]) + 1) * group.hash_tokens
    return run * group.block_tokens


def _sliding_window(
    presence: Presence, boundaries: NDArray[np.int_], _align: int, _limit: int
) -> NDArray[np.bool_]:
    """The blocks that cover the window before the boundary, and the proof behind them."""
    group, blocks = presence.group, presence.blocks
    gaps_before = np.zeros(len(blocks) + 1, dtype=np.int64)
    np.cumsum(~blocks, out=gaps_before[1:])
    middles = boundaries // group.block_tokens
    starts = np.maximum(middles - group.window_blocks, 0)
    stops = middles + group.proof_blocks
    last = len(blocks)
    covered = gaps_before[np.minimum(stops, last)] == gaps_before[np.minimum(starts, last)]
    return covered & (stops <= last)


def _recurrent_state(
    presence: Presence, boundaries: NDArray[np.int_], align_tokens: int, _limit: int
) -> NDArray[np.bool_]:
    """The one state that ends at the boundary."""
    group = presence.group
    found = _at(presence.blocks, boundaries, group.block_tokens)
    if presence.tails is not None and align_tokens % group.block_tokens:
        found |= _at(presence.tails, boundaries, group.hash_tokens)
    return found


def _at(present: NDArray[np.bool_], boundaries: NDArray[np.int_], step: int) -> NDArray[np.bool_]:
    """Whether what ends at each of ``boundaries`` is present, in an array of one entry a step."""
    positions = boundaries // step - 1
    inside = (boundaries % step == 0) & (positions >= 0) & (positions < len(present))
    found = np.zeros(len(boundaries), dtype=np.bool_)
    found[inside] = present[positions[inside]]
    return found


_RULES = {
    GroupKind.FULL_ATTENTION: _full_attention,
    GroupKind.SLIDING_WINDOW: _sliding_window,
    GroupKind.RECURRENT_STATE: _recurrent_state,
}


def joint_hit_tokens(
    presences: Sequence[Presence], limit_tokens: int, align_tokens: int, local_tokens: int = 0
) -> int:
    """The highest boundary up to ``limit_tokens`` at which all groups resume, in tokens.

    ``limit_tokens`` is one less than the request's tokens: the last one is computed.
    ``local_tokens`` is what the engine has itself, at a boundary where all groups resume: blocks
    before it count as present. Without a higher boundary the answer is ``local_tokens``.

    >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    >>> state = Group(1, GroupKind.RECURRENT_STATE, 16, 1, ())
    >>> has_all = Presence(full, np.array([True, True, True, True]))
    >>> has_two = Presence(state, np.array([False, True, False, True]))
    >>> joint_hit_tokens([has_all, has_two], 79, 16), joint_hit_tokens([has_all, has_two], 63, 16)
    (64, 32)
    """
    joint: NDArray[np.bool_] | None = None
    for presence in presences:
        found = resumable(_with_local(presence, local_tokens), limit_tokens, align_tokens)
        joint = found if joint is None else joint & found
    if joint is None:
        return local_tokens
    return max(local_tokens, int(np.flatnonzero(joint)[-1]) * align_tokens)


def _with_local(presence: Presence, local_tokens: int) -> Presence:
    """``presence`` with all blocks before ``local_tokens``: above it, nothing reads further back.

    A state is read only at its boundary, so what lies before does not matter to it.
    """
    count = local_tokens // presence.group.block_tokens
    if not count or presence.group.kind is GroupKind.RECURRENT_STATE:
        return presence
    rest = presence.blocks[count:]
    return replace(presence, blocks=np.concatenate([np.ones(count, dtype=np.bool_), rest]))
