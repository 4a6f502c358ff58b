"""The joint hit over several KV-cache groups: what one answer of the scheduler half costs.

No engine: the index of the host cache alone, filled as a prompt that is kept leaves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Final

from moonstep.groups import Group, GroupKind, kept_boundaries, kept_positions
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


def joint_hit_us(tokens: int, windows: int, samples: int, *, gone: bool) -> list[float]:
    """Times of lookups for a prompt of ``tokens`` that is all kept.

    ``gone``: of the last group nothing is left, so that every boundary has to be tried in vain.
    """
    groups = groups_of(windows)
    names = [hashlib.sha256(b"%d" % block).digest() for block in range(tokens // BLOCK_TOKENS)]
    index = HostIndex(len(groups), LruPolicy())
    index.resize(len(names) * len(groups))
    boundaries = kept_boundaries(groups, tokens, INTERVAL_TOKENS)
    for group in groups[:-1] if gone else groups:
        _keep(index, group, names, kept_positions(group, boundaries).tolist())
    asking: Any = _Asking(tokens + 1, names)
    lookup = JointLookup(groups, BLOCK_TOKENS)
    times: list[float] = []
    for _ in range(samples):
        start_ns = perf_counter_ns()
        found = lookup.hit_tokens(index, asking, 0)
        times.append((perf_counter_ns() - start_ns) / 1e3)
        assert found == (0 if gone else tokens), found
    return times


def _keep(index: HostIndex, group: Group, names: Sequence[bytes], positions: list[int]) -> None:
    columns = Columns(group.index)
    for at in positions:
        columns.add(1, at, names[at], at + 1)
    placed = index.plan(columns)
    assert placed is not None
    index.acknowledge(placed)
