"""The joint hit over several KV-cache groups: what one answer of the scheduler half costs.

No engine: the index of the host cache alone, filled as a prompt that is kept leaves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter_ns
from typing import Any, Final

from moonstep.groups import Group, GroupKind, kept_boundaries, kept_positions, needed_blocks
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.lookup import JointLookup
from moonstep.scheduler.policies import LruPolicy

BLOCK_TOKENS: Final = 16
WINDOW_TOKENS: Final = 1024
INTERVAL_TOKENS: Final = 8192


@dataclass(slots=True)
class _Asking:
    """As much of a request as a lookup reads."""

    num_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)


def groups_of(windows: int) -> list[Group]:
    """One group of full attention and so many of sliding windows."""
    full = Group(0, GroupKind.FULL_ATTENTION, BLOCK_TOKENS, 1, ())
    kind = GroupKind.SLIDING_WINDOW
    return [full] + [
        Group(1 + n, kind, BLOCK_TOKENS, 1, (), window_tokens=WINDOW_TOKENS) for n in range(windows)
    ]


class Lost(Enum):
    """What the host cache has lost of a prompt that was kept whole."""

    NOTHING = "all there"
    WINDOW = "a window gone"
    """Of the last group nothing is left: every boundary is looked for in vain."""
    IN_TURN = "holes in turn"
    """At each boundary but the lowest another group lacks a block of its window."""
    ALL = "never seen"

    def lacks(self, group: Group, groups: Sequence[Group], boundaries: Sequence[int]) -> set[int]:
        """Positions of a group whose blocks are lost."""
        every = set(kept_positions(group, boundaries))
        windows = groups[1:]
        if self is Lost.ALL or (self is Lost.WINDOW and group is groups[-1]):
            return every
        if self is Lost.IN_TURN and group in windows:
            mine = boundaries[1 + windows.index(group) :: len(windows)]
            return {needed_blocks(group, boundary)[1] for boundary in mine}
        return set()


def joint_hit_us(tokens: int, windows: int, samples: int, lost: Lost) -> list[float]:
    """Times of lookups for a prompt of ``tokens`` that was all kept, but for what is ``lost``."""
    groups = groups_of(windows)
    names = [hashlib.sha256(b"%d" % block).digest() for block in range(tokens // BLOCK_TOKENS)]
    index = HostIndex(len(groups), LruPolicy())
    index.resize(len(names) * len(groups))
    boundaries = kept_boundaries(groups, tokens, INTERVAL_TOKENS)
    for group in groups:
        lacks = lost.lacks(group, groups, boundaries)
        kept = [at for at in kept_positions(group, boundaries) if at not in lacks]
        _keep(index, group, names, kept)
    asking: Any = _Asking(tokens + 1, names)
    lookup = JointLookup(groups, BLOCK_TOKENS)
    expected = {Lost.NOTHING: tokens, Lost.IN_TURN: boundaries[0]}.get(lost, 0)
    times: list[float] = []
    for _ in range(samples):
        start_ns = perf_counter_ns()
        found = lookup.hit_tokens(index, asking, 0)
        times.append((perf_counter_ns() - start_ns) / 1e3)
        assert found == expected, found
    return times


def _keep(index: HostIndex, group: Group, names: Sequence[bytes], positions: list[int]) -> None:
    columns = Columns(group.index)
    for at in positions:
        columns.add(1, at, names[at], at + 1)
    placed = index.plan(columns)
    if placed is not None:
        index.acknowledge(placed)
