"""What can be promised to a request: the highest boundary at which all groups can resume."""

from __future__ import annotations

from collections.abc import Iterable

from moonstep.engine import Request
from moonstep.groups import Group, GroupKind, block_names, hit_blocks
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.slots import AT_ONCE


class JointLookup:
    """Looks for the boundary up to which every group has slots for what a resume reads.

    Promises are multiples of ``align_tokens``, which all groups' blocks divide. Reads the index,
    changes nothing: an answer pins no slot.
    """

    def __init__(self, groups: Iterable[Group], align_tokens: int) -> None:
        groups = list(groups)
        self._align = align_tokens
        self._dense = [g for g in groups if g.kind is GroupKind.FULL_ATTENTION]
        sparse = [g for g in groups if g.kind is not GroupKind.FULL_ATTENTION]
        # States are the fewest: what is tried first should fail first.
        self._sparse = sorted(sparse, key=lambda g: g.kind is GroupKind.SLIDING_WINDOW)

    def hit_tokens(self, index: HostIndex, request: Request, local_tokens: int) -> int:
        """Tokens beyond ``local_tokens`` that the host cache can restore for ``request``.

        ``local_tokens`` is the engine's own hit, a multiple of every group's block. The last token
        is never promised.
        """
        limit = self._below(min(request.num_tokens - 1, self._hashed_tokens(request)))
        for group in self._dense:
            if limit <= local_tokens:
                return 0
            limit = self._below(self._dense_tokens(index, group, request, local_tokens, limit))
        if self._sparse and limit > local_tokens:
            limit = self._sparse_tokens(index, request, local_tokens, limit)
        return max(0, limit - local_tokens)

    def _below(self, tokens: int) -> int:
        return tokens // self._align * self._align

    def _hashed_tokens(self, request: Request) -> int:
        group = (self._dense or self._sparse)[0]
        return len(request.block_hashes) * group.hash_tokens

    def _dense_tokens(
        self, index: HostIndex, group: Group, request: Request, local_tokens: int, limit: int
    ) -> int:
        """How far a group of full attention reaches without a gap, less its proof."""
        block = group.block_tokens
        start, stop = local_tokens // block, limit // block + group.proof_blocks
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
            for group in self._sparse:
                below = self._at_or_below(index, group, request, local_tokens, boundary)
                if below < boundary:
                    boundary = self._below(below)
                    break
            else:
                return boundary
        return 0

    def _at_or_below(
        self, index: HostIndex, group: Group, request: Request, local_tokens: int, boundary: int
    ) -> int:
        """``boundary`` if the group can resume there, else no less than the next one it might."""
        needed = hit_blocks(group, boundary)
        first = max(needed.start, local_tokens // group.block_tokens)
        names = block_names(request.block_hashes, group, first, needed.stop)
        last = boundary // group.block_tokens - first  # what lies behind it is the proof
        there = index.which_written(group.index, names)
        if all(there) and len(names) == needed.stop - first:
            return boundary
        if all(there[:last]):
            return boundary - self._align
        if not there[last - 1]:
            return self._ending_below(index, group, request, local_tokens, boundary)
        return (first + there.index(False)) * group.block_tokens

    def _ending_below(
        self, index: HostIndex, group: Group, request: Request, local_tokens: int, boundary: int
    ) -> int:
        """The highest boundary below this one that the group has the block before."""
        step = self._align // group.hash_tokens
        stop, start = boundary // self._align - 1, local_tokens // self._align
        while stop > start:
            first = max(start, stop - AT_ONCE)
            ends = request.block_hashes[(first + 1) * step - 1 : stop * step : step]
            held = list(index.which_held(group.index, ends))
            if True in held:
                return (stop - held[::-1].index(True)) * self._align
            stop = first
        return 0
