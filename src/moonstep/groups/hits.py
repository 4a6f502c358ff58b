"""From which blocks are present to the boundaries at which a request can resume.

This is the rule itself, over all that is present. The scheduler half, which has an index of
thousands of names to ask, looks only where it may matter and has to find the same
(``moonstep.scheduler.lookup``).
"""

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
    limit of the hit, as far as the request is hashed.
    """

    group: Group
    blocks: NDArray[np.bool_]


def resumable(presence: Presence, limit_tokens: int, align_tokens: int) -> NDArray[np.bool_]:
    """At which of the boundaries 0, ``align_tokens``, ... up to ``limit_tokens`` a group resumes.

    ``align_tokens`` is a multiple of the group's block. The boundary 0 is always one.

    >>> window = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
    >>> blocks = np.array([False, True, True, True, False])
    >>> resumable(Presence(window, blocks), 80, 16).tolist()
    [True, False, False, True, True, False]
    """
    found = np.zeros(max(limit_tokens, 0) // align_tokens + 1, dtype=np.bool_)
    found[0] = True
    at_boundaries = _RULES[presence.group.kind](presence, align_tokens)[: len(found) - 1]
    found[1 : len(at_boundaries) + 1] = at_boundaries
    return found


def _full_attention(presence: Presence, align_tokens: int) -> NDArray[np.bool_]:
    """Whether all blocks up to each boundary but 0, and the proof behind it, are there."""
    blocks, group = presence.blocks, presence.group
    run = len(blocks) if blocks.all() else int(blocks.argmin())
    reach_tokens = (run - group.proof_blocks) * group.block_tokens
    return np.ones(max(0, reach_tokens) // align_tokens, dtype=np.bool_)


def _sliding_window(presence: Presence, align_tokens: int) -> NDArray[np.bool_]:
    """Whether the window before each boundary but 0, and the proof behind it, has no gap."""
    group = presence.group
    before, step = group.window_blocks, align_tokens // group.block_tokens
    # ``gaps[before + i]`` counts the gaps in the first ``i`` blocks; before the head is none.
    gaps = np.zeros(before + len(presence.blocks) + 1, dtype=np.int32)
    np.cumsum(~presence.blocks, out=gaps[before + 1 :])
    at_end = gaps[before + step + group.proof_blocks :: step]
    at_start = gaps[step::step]
    covered: NDArray[np.bool_] = at_end == at_start[: len(at_end)]
    return covered


def _recurrent_state(presence: Presence, align_tokens: int) -> NDArray[np.bool_]:
    """Whether there is a state that ends at each boundary but 0."""
    step = align_tokens // presence.group.block_tokens
    return presence.blocks[step - 1 :: step]


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
    joint = np.ones(max(limit_tokens, 0) // align_tokens + 1, dtype=np.bool_)
    for presence in presences:
        joint &= resumable(_with_local(presence, local_tokens), limit_tokens, align_tokens)
    highest = len(joint) - 1 - int(joint[::-1].argmax())
    return max(local_tokens, highest * align_tokens)


def _with_local(presence: Presence, local_tokens: int) -> Presence:
    """``presence`` with all blocks before ``local_tokens``.

    What a resume above it reads of them, the engine has: its own hit needs no less.
    """
    count = local_tokens // presence.group.block_tokens
    if not count:
        return presence
    rest = presence.blocks[count:]
    return replace(presence, blocks=np.concatenate([np.ones(count, dtype=np.bool_), rest]))
