"""What a resume reads: the one rule from which writer and reader are both derived."""

from __future__ import annotations

from moonstep.groups.group import Group, GroupKind


def needed_blocks(group: Group, boundary_tokens: int) -> range:
    """Positions in the block table that a resume at ``boundary_tokens`` reads.

    Full attention reads all blocks up to the boundary, a window those that cover it, recurrent
    layers the one state that ends there. A boundary inside a block includes that block.

    >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
    >>> window = Group(1, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
    >>> state = Group(2, GroupKind.RECURRENT_STATE, 16, 1, ())
    >>> [needed_blocks(group, 64) for group in (full, window, state)]
    [range(0, 4), range(2, 4), range(3, 4)]
    """
    stop = -(-boundary_tokens // group.block_tokens)
    if group.kind is GroupKind.SLIDING_WINDOW:
        start = max(0, boundary_tokens - group.window_tokens + 1) // group.block_tokens
    elif group.kind is GroupKind.RECURRENT_STATE:
        start = max(0, stop - 1)
    else:
        start = 0
    return range(start, stop)


def hit_blocks(group: Group, boundary_tokens: int) -> range:
    """Positions that have to be present for a hit at ``boundary_tokens``, a block boundary.

    What the resume reads and, with drafts, the block after it: it is read by nobody, its name
    proves the token that follows the boundary.

    >>> draft = Group(0, GroupKind.FULL_ATTENTION, 16, 1, (), draft=True)
    >>> needed_blocks(draft, 32), hit_blocks(draft, 32), hit_blocks(draft, 0)
    (range(0, 2), range(0, 3), range(0, 0))
    """
    needed = needed_blocks(group, boundary_tokens)
    if not needed:
        return needed
    return range(needed.start, needed.stop + group.proof_blocks)
