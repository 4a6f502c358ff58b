"""What is kept of a window or a state: only what a later hit can use.

Full attention is kept whole. Of the other kinds a hit needs what belongs to its boundary, so what
is kept is decided by boundaries: where the same prompt sent again can resume, where a longer one
can, and the ends of a retention interval for prompts that diverge in between. Which blocks belong
to a boundary says :func:`moonstep.groups.needs.hit_blocks`, from which the reader's rule follows
as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moonstep.groups.group import Group
from moonstep.groups.needs import hit_blocks


def reachable_tokens(groups: Sequence[Group], hashed_tokens: int, limit_tokens: int) -> int:
    """The highest boundary up to ``limit_tokens`` for which ``hashed_tokens`` give every block.

    Boundaries are common multiples of the blocks of all groups.

    >>> from moonstep.groups import GroupKind
    >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    >>> state = Group(1, GroupKind.RECURRENT_STATE, 64, 1, (), hash_tokens=16)
    >>> reachable_tokens([full, state], 130, 129)
    128
    """
    highest = min(
        (hashed_tokens // group.block_tokens - group.proof_blocks) * group.block_tokens
        for group in groups
    )
    align = alignment_tokens(groups)
    return max(0, min(highest, limit_tokens)) // align * align


def alignment_tokens(groups: Iterable[Group]) -> int:
    """The least common multiple of all blocks: where joint hits end.

    >>> from moonstep.groups import GroupKind
    >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    >>> alignment_tokens([full, Group(1, GroupKind.FULL_ATTENTION, 24, 1, (), hash_tokens=8)])
    48
    """
    return int(np.lcm.reduce([group.block_tokens for group in groups]))


def replay_boundaries(groups: Sequence[Group], num_tokens: int) -> tuple[int, int]:
    """Where a prompt of ``num_tokens`` resumes when it is sent again, and when it is extended.

    They differ only if the prompt ends on a boundary: its last token is always computed.

    >>> from moonstep.groups import GroupKind
    >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    >>> replay_boundaries([full], 64), replay_boundaries([full], 65)
    ((48, 64), (64, 64))
    """
    return (
        reachable_tokens(groups, num_tokens, num_tokens - 1),
        reachable_tokens(groups, num_tokens, num_tokens),
    )


def kept_boundaries(groups: Sequence[Group], num_tokens: int, interval_tokens: int) -> list[int]:
    """All boundaries at which a prompt of ``num_tokens`` can be resumed, ascending.

    ``interval_tokens`` is a multiple of the groups' alignment; 0 keeps none but the replay's.

    >>> from moonstep.groups import GroupKind
    >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    >>> kept_boundaries([full], 112, 32), kept_boundaries([full], 112, 0)
    ([32, 64, 96, 112], [96, 112])
    """
    resend, extension = replay_boundaries(groups, num_tokens)
    ends = interval_ends(interval_tokens, 0, extension)
    return sorted({*ends, resend, extension} - {0})


def interval_ends(interval_tokens: int, above_tokens: int, up_to_tokens: int) -> range:
    """The ends of intervals in ``(above, up_to]``; none for an interval of 0.

    >>> list(interval_ends(32, 32, 96)), list(interval_ends(0, 32, 96))
    ([64, 96], [])
    """
    if not interval_tokens:
        return range(0)
    first_tokens = (above_tokens // interval_tokens + 1) * interval_tokens
    return range(first_tokens, up_to_tokens + 1, interval_tokens)


def kept_positions(
    group: Group, boundaries: Iterable[int], first: int = 0, stop: int | None = None
) -> list[int]:
    """Positions of the blocks that hits at ``boundaries`` need, ascending, each once.

    All of them, or those in ``[first, stop)``.

    >>> from moonstep.groups import GroupKind
    >>> window = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
    >>> kept_positions(window, [64, 80]), kept_positions(window, [64, 80], 3, 4)
    ([2, 3, 4], [3])
    """
    kept: set[int] = set()
    for boundary in boundaries:
        needed = hit_blocks(group, boundary)
        end = needed.stop if stop is None else min(needed.stop, stop)
        kept.update(range(max(needed.start, first), end))
    return sorted(kept)
