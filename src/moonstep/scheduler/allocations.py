"""Blocks that the engine hands out: who has to hear of them, and whose they are.

The witness is told once, when a block is handed out, and once more when a life ends with blocks it
has not computed. In between nothing is noted, however many blocks are filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from moonstep.groups import Group, GroupKind, alignment_tokens
from moonstep.scheduler.columns import Numbers, numbers
from moonstep.scheduler.lookahead import LookAhead
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.witness import NOBODY, Witness


class Grown(NamedTuple):
    """Blocks that running lives got in a step: each with its source and its place there."""

    blocks: Sequence[int] | Numbers
    sources: Sequence[int] | Numbers
    depths: Sequence[int] | Numbers


class GrownLists(NamedTuple):
    """The same while they are collected."""

    blocks: list[int]
    sources: list[int]
    depths: list[int]

    def note(self, blocks: Sequence[int], source: int, first: int) -> None:
        """A run of blocks of one source, from the depth ``first`` on."""
        count = len(blocks)
        self.blocks.extend(blocks)
        self.sources.extend(repeat(source, count))
        self.depths.extend(range(first, first + count))


class Allocations:
    """Tells witness and look-ahead of what is handed out. Scheduler thread only.

    Blocks of full attention are their life's; those of windows and states are noted by whoever
    keeps them, since few are.
    """

    def __init__(self, groups: Sequence[Group], witness: Witness, lookahead: LookAhead) -> None:
        self._groups = tuple(groups)
        self._dense = [g for g in groups if g.kind is GroupKind.FULL_ATTENTION]
        self._has_gaps = len(self._dense) < len(self._groups)
        # Beyond the last boundary the engine names nothing, and no hit could use it.
        self._align_tokens = alignment_tokens(groups)
        self._witness = witness
        self._lookahead = lookahead

    def begin(self, tracker: RequestTracker, local_tokens: int) -> None:
        """A life begins on tables of which the engine had ``local_tokens``; the rest is new."""
        sources = [NOBODY] * len(tracker.tables.by_group)
        tracker.sources = sources
        for group in self._dense if tracker.saves else ():
            names, first = tracker.request.block_hashes, local_tokens // group.block_tokens
            sources[group.index] = self._witness.begin(
                tracker.life, group.index, names, group.units, first
            )
        for group in self._groups:
            table = tracker.tables.by_group[group.index]
            first = local_tokens // group.block_tokens
            self._lookahead.saw_used_again(table[:first])
            if source := sources[group.index]:
                new = table[first:]
                self._witness.saw_allocated(new, source, range(first, len(table)))
                self._lookahead.saw_taken(new)
            else:
                self.handed_out(table[first:])

    def grew(self, grown: Grown) -> None:
        """Running lives got these blocks."""
        if self._has_gaps and 0 in grown.blocks:  # 0 stands where there is none
            is_there = np.flatnonzero(numbers(grown.blocks))
            grown = Grown(*(numbers(column)[is_there] for column in grown))
        blocks = numbers(grown.blocks)
        self._witness.saw_allocated(blocks, grown.sources, grown.depths)
        self._lookahead.saw_taken(blocks)

    def handed_out(self, blocks: Sequence[int]) -> None:
        """These blocks went to someone whose work we do not see."""
        if self._has_gaps:
            blocks = [block for block in blocks if block]
        self._witness.saw_allocated(blocks)
        self._lookahead.saw_taken(blocks)

    def handed_out_beyond(self, tables: Sequence[Sequence[int]], local_tokens: int) -> None:
        """As ``handed_out``: whole tables, of which the engine had ``local_tokens``."""
        for group in self._groups:
            self.handed_out(tables[group.index][local_tokens // group.block_tokens :])

    def end(self, tracker: RequestTracker, limit_tokens: int | None = None) -> None:
        """A life has ended: what it had not computed by then is nobody's.

        ``limit_tokens`` is where the next life of a session begins that goes on with its tables, or
        what the engine counts as computed of a request that has ended for good.
        """
        tracker.catch_up(limit_tokens)
        for group in self._dense:
            stop = whole_blocks(tracker, group, self._align_tokens)
            if not tracker.is_followed:
                tracker.next_block[group.index] = max(tracker.next_block[group.index], stop)
            table = tracker.tables.by_group[group.index]
            self._witness.end(tracker.sources[group.index], table[stop:], stop)
        tracker.sources = ()


def whole_blocks(tracker: RequestTracker, group: Group, align_tokens: int) -> int:
    """Blocks that a life has whole and named, up to the last boundary of all groups."""
    hashed_tokens = len(tracker.request.block_hashes) * group.hash_tokens
    named_tokens = min(tracker.token_len, hashed_tokens)
    return named_tokens // align_tokens * (align_tokens // group.block_tokens)
