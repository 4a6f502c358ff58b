"""What can be promised to a request: the highest boundary at which all groups can resume."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from moonstep.engine import Request
from moonstep.groups import Group, GroupKind, block_names, hit_blocks
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.slots import AT_ONCE

PROBE_BLOCKS: Final = 128
"""How far apart the blocks of full attention are that are asked about before all others."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Groups that need the same blocks at every boundary: one of them, and their numbers."""

    group: Group
    numbers: list[int]


class JointLookup:
    """Looks for the boundary up to which every group has slots for what a resume reads.

    Promises are multiples of ``align_tokens``, which all groups' blocks divide. Reads the index,
    changes nothing: an answer pins no slot.

    Windows and states are asked first, from the top, since they are kept at few boundaries; full
    attention then only up to the boundary they allow. So hardly a block is asked about that the
    answer does not depend on: every block of a window that is looked for in vain is one less that
    full attention is asked about.
    """

    def __init__(self, groups: Iterable[Group], align_tokens: int) -> None:
        groups = list(groups)
        self._align = align_tokens
        self._dense = [g for g in groups if g.kind is GroupKind.FULL_ATTENTION]
        sparse = [g for g in groups if g.kind is not GroupKind.FULL_ATTENTION]
        # States are the fewest: what is tried first should fail first.
        sparse.sort(key=lambda g: g.kind is GroupKind.SLIDING_WINDOW)
        self._sparse = _alike(sparse)

    def hit_tokens(self, index: HostIndex, request: Request, local_tokens: int) -> int:
        """Tokens beyond ``local_tokens`` that the host cache can restore for ``request``.

        ``local_tokens`` is the engine's own hit, a multiple of every group's block. The last token
        is never promised.
        """
        limit = self._below(min(request.num_tokens - 1, self._hashed_tokens(request)))
        if self._sparse:
            for group in self._dense:
                limit = self._within_probes(index, group, request, local_tokens, limit)
            limit = self._sparse_tokens(index, request, local_tokens, limit)
        reach = limit
        for group in self._dense:
            if reach <= local_tokens:
                return 0
            reach = self._below(self._dense_tokens(index, group, request, local_tokens, reach))
        if self._sparse and reach < limit:  # up to there the others have been asked already
            reach = self._sparse_tokens(index, request, local_tokens, reach)
        return max(0, reach - local_tokens)

    def _below(self, tokens: int) -> int:
        return tokens // self._align * self._align

    def _hashed_tokens(self, request: Request) -> int:
        group = self._dense[0] if self._dense else self._sparse[0].group
        return len(request.block_hashes) * group.hash_tokens

    def _within_probes(
        self, index: HostIndex, group: Group, request: Request, local_tokens: int, limit: int
    ) -> int:
        """A boundary up to ``limit`` that a group of full attention cannot reach beyond.

        A block in every ``PROBE_BLOCKS`` is asked about: what the host cache has never seen is
        found out at once, and no window is looked for where the run has long ended.
        """
        first, stop = local_tokens // group.block_tokens, limit // group.block_tokens
        step = PROBE_BLOCKS * group.units
        probes = request.block_hashes[
            first * group.units + group.units - 1 : stop * group.units : step
        ]
        held = list(index.which_held(group.index, probes))
        if False not in held:
            return limit
        run = first + held.index(False) * PROBE_BLOCKS - group.proof_blocks
        return self._below(max(0, run) * group.block_tokens)

    def _dense_tokens(
        self, index: HostIndex, group: Group, request: Request, local_tokens: int, limit: int
    ) -> int:
        """How far a group of full attention reaches without a gap, less its proof."""
        block = group.block_tokens
        start, stop = local_tokens // block, limit // block + group.proof_blocks
        if group.units == 1:  # each hash is a name: nothing is copied
            names = request.block_hashes
            run = index.written_run(group.index, names, start, min(stop, len(names)))
        else:
            names = block_names(request.block_hashes, group, start, stop)
            run = index.written_run(group.index, names, 0, len(names))
        return (start + run - group.proof_blocks) * block

    def _sparse_tokens(
        self, index: HostIndex, request: Request, local_tokens: int, limit: int
    ) -> int:
        """The highest boundary in ``(local_tokens, limit]`` that windows and states allow, or 0.

        From the top; a group that cannot resume at a boundary says which one below it might be
        next, so that no block is asked about twice.
        """
        boundary = limit
        while boundary > local_tokens:
            for alike in self._sparse:
                below = self._at_or_below(index, alike, request, local_tokens, boundary)
                if below < boundary:
                    boundary = self._below(below)
                    break
            else:
                return boundary
        return 0

    def _at_or_below(
        self, index: HostIndex, alike: _Alike, request: Request, local_tokens: int, boundary: int
    ) -> int:
        """``boundary`` if these groups can resume there, else where they might next, or above."""
        group = alike.group
        needed = hit_blocks(group, boundary)
        first = max(needed.start, local_tokens // group.block_tokens)
        names = block_names(request.block_hashes, group, first, needed.stop)
        last = boundary // group.block_tokens - first  # what lies behind it is the proof
        for number in alike.numbers:
            there = list(index.which_held(number, names))
            if index.planned_count and False not in there:
                there = index.which_written(number, names)
            if False not in there and len(names) == needed.stop - first:
                continue
            if False not in there[:last]:
                return boundary - self._align
            if not there[last - 1]:
                return self._ending_below(index, group, number, request, local_tokens, boundary)
            return (first + there.index(False)) * group.block_tokens
        return boundary

    def _ending_below(
        self,
        index: HostIndex,
        group: Group,
        number: int,
        request: Request,
        local_tokens: int,
        boundary: int,
    ) -> int:
        """The highest boundary below this one that group ``number`` has the block before."""
        step = self._align // group.hash_tokens
        stop, start = boundary // self._align - 1, local_tokens // self._align
        while stop > start:
            first = max(start, stop - AT_ONCE)
            ends = request.block_hashes[(first + 1) * step - 1 : stop * step : step]
            held = list(index.which_held(number, ends))
            if True in held:
                return (stop - held[::-1].index(True)) * self._align
            stop = first
        return 0


def _alike(groups: Iterable[Group]) -> list[_Alike]:
    """These groups, those together that need the same blocks at every boundary."""
    numbers: dict[Group, list[int]] = {}
    for group in groups:
        what = replace(group, index=0, block_bytes=0, layer_names=())
        numbers.setdefault(what, []).append(group.index)
    return [_Alike(group, found) for group, found in numbers.items()]
