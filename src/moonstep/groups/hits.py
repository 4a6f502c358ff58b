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
    found = np.zeros(limit_tokens // align_tokens + 1, dtype=np.bool_)
    found[0] = True
    kind = presence.group.kind
    if kind is GroupKind.FULL_ATTENTION:
        reach = _full_attention_tokens(presence, limit_tokens, align_tokens)
        found[1 : reach // align_tokens + 1] = True
    else:
        rule = _window_covered if kind is GroupKind.SLIDING_WINDOW else _state_present
        covered = rule(presence, align_tokens)[: len(found) - 1]
        found[1 : len(covered) + 1] = covered
    return found


def _full_attention_tokens(presence: Presence, limit_tokens: int, align_tokens: int) -> int:
    """How far all blocks are present, the proof behind them aside."""
    group = presence.group
    proof_tokens = group.proof_blocks * min(align_tokens, group.block_tokens)
    return max(0, _run_tokens(presence, limit_tokens + proof_tokens) - proof_tokens)


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


def _window_covered(presence: Presence, align_tokens: int) -> NDArray[np.bool_]:
    """Whether the window before each boundary but 0, and the proof behind it, has no gap."""
    group = presence.group
    before, step = group.window_blocks, align_tokens // group.block_tokens
    # ``gaps[before + i]`` counts the gaps in the first ``i`` blocks; before the head is none.
    gaps = np.zeros(before + len(presence.blocks) + 1, dtype=np.int32)
    np.cumsum(~presence.blocks, out=gaps[before + 1 :])
    at_end = gaps[before + step + group.proof_blocks :: step]
    at_start = gaps[step::step]
    return at_end == at_start[: len(at_end)]


def _state_present(presence: Presence, align_tokens: int) -> NDArray[np.bool_]:
    """Whether there is a state that ends at each boundary but 0."""
    group = presence.group
    if align_tokens % group.block_tokens == 0:
        step = align_tokens // group.block_tokens
        return presence.blocks[step - 1 :: step]
    count = len(presence.blocks) * group.units
    ends = np.zeros(count + group.units, dtype=np.bool_)
    if presence.tails is not None:
        tails = presence.tails[: len(ends)]
        ends[: len(tails)] = tails
    ends[group.units - 1 : count : group.units] |= presence.blocks
    step = align_tokens // group.hash_tokens
    return ends[step - 1 :: step]


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
    joint = np.ones(max(limit_tokens, 0) // align_tokens + 1, dtype=np.bool_)
    for presence in presences:
        joint &= resumable(_with_local(presence, local_tokens), limit_tokens, align_tokens)
    highest = len(joint) - 1 - int(joint[::-1].argmax())
    return max(local_tokens, highest * align_tokens)


def _with_local(presence: Presence, local_tokens: int) -> Presence:
    """``presence`` with all blocks before ``local_tokens``: above it, nothing reads further back.

    A state is read only at its boundary, so what lies before does not matter to it.
    """
    count = local_tokens // presence.group.block_tokens
    if not count or presence.group.kind is GroupKind.RECURRENT_STATE:
        return presence
    rest = presence.blocks[count:]
    return replace(presence, blocks=np.concatenate([np.ones(count, dtype=np.bool_), rest]))
