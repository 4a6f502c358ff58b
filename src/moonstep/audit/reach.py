"""Reach: from which boundary a request could go on, by what a connector keeps.

The rules are written down once more here, apart from any connector's: every block up to the
boundary of full attention, the blocks that cover the window before it, the one state at it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moonstep.audit.engine import Engine
    from moonstep.audit.inspector import Kept

Name = tuple[int, bytes]
"""Group and hash of a block."""


def needed_blocks(
    boundary: int, block_tokens: int, window_tokens: int | None, *, recurrent: bool
) -> range:
    """Positions of the blocks that a request reads that goes on from a boundary.

    >>> needed_blocks(64, 16, None, recurrent=False), needed_blocks(64, 16, 18, recurrent=False)
    (range(0, 4), range(2, 4))
    >>> needed_blocks(64, 32, 18, recurrent=False), needed_blocks(64, 16, None, recurrent=True)
    (range(1, 2), range(3, 4))
    """
    last = boundary // block_tokens
    if recurrent:
        return range(last - 1, last)
    if window_tokens is None:
        return range(last)
    return range(max(0, boundary - window_tokens + 1) // block_tokens, last)


def kept_runs(kept: Iterable[Kept], copies: Sequence[Sequence[int]]) -> dict[Name, int]:
    """By group and hash, how many blocks up to that hash's are kept in one piece, on every rank.

    `copies` says, for each rank and group, which rank is the first with the same bytes: one of
    them is enough.
    """
    found: dict[tuple[int, bytes, int], int] = defaultdict(int)
    for one in kept:
        at = (one.group, one.block_hash, copies[one.rank][one.group])
        found[at] = max(found[at], one.blocks)
    names = {(group, name) for group, name, _ in found}
    return {
        (group, name): min(found.get((group, name, of[group]), 0) for of in copies)
        for group, name in names
    }


def proof_groups(engine: Engine) -> set[int]:
    """Groups of which the engine wants one block more than a hit has, for the drafter's sake."""
    memory = engine.ranks[0].memory
    drafters: set[int] = engine.scheduler.kv_cache_manager.coordinator.eagle_group_ids
    return {group for group in drafters if not memory.is_recurrent[group]}


def boundaries(engine: Engine, hashes: Sequence[bytes], limit_tokens: int) -> list[int]:
    """All boundaries up to a limit from which these hashes could go on, highest last."""
    if engine.inspector is None:
        return []
    memory = engine.ranks[0].memory
    runs = kept_runs(engine.inspector.kept(), [rank.memory.first_copies for rank in engine.ranks])
    proofs = proof_groups(engine)

    def run_at(group: int, position: int) -> int:
        """Blocks that are kept in one piece up to this one."""
        end = (position + 1) * memory.block_tokens[group] // engine.hash_tokens
        return runs.get((group, bytes(hashes[end - 1])), 0) if end <= len(hashes) else 0

    def has_all(boundary: int) -> bool:
        for group, tokens in enumerate(memory.block_tokens):
            window_tokens, recurrent = memory.window_tokens[group], memory.is_recurrent[group]
            needed = needed_blocks(boundary, tokens, window_tokens, recurrent=recurrent)
            missing = {*needed, *range(needed.stop, needed.stop + (group in proofs))}
            for at in sorted(missing, reverse=True):
                run = run_at(group, at)
                # A window kept in one piece is found where it ends, and nowhere else.
                if window_tokens is None or run == 1 or at == needed.stop - 1 + (group in proofs):
                    missing.difference_update(range(at - run + 1, at + 1))
            if missing:
                return False
        return True

    unit = engine.unit_tokens
    return [at for at in range(unit, limit_tokens + 1, unit) if has_all(at)]


def highest(engine: Engine, computed_tokens: int, asked_tokens: int) -> int:
    """Where a prompt of which so many tokens were computed as a prompt can be gone on from.

    All but its last token at most. A state at the very end of a computed prompt exists only where
    the engine keeps one: it stops its prefill at the boundary before. With blocks of unequal size
    that is a boundary of the smallest, which may be none of all groups.
    """
    memory = engine.ranks[0].memory
    if any(memory.is_recurrent) and len(set(memory.block_tokens)) > 1:
        return 0
    proofs = proof_groups(engine)
    interval = engine.shape.interval_tokens
    limit = asked_tokens - 1
    if any(memory.is_recurrent) and not proofs and interval is not None:
        ends_interval = interval and computed_tokens % interval == 0
        limit = min(limit, computed_tokens if ends_interval else computed_tokens - 1)
    for group, tokens in enumerate(memory.block_tokens):
        if not memory.is_recurrent[group]:
            limit = min(limit, (computed_tokens // tokens - (group in proofs)) * tokens)
    return max(0, limit // engine.unit_tokens * engine.unit_tokens)
