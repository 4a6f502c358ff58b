"""What of a request's prefix a store is asked for, and how far what it has reaches.

A prompt that comes again ends where it ended before, so its own end is asked for with its runs. A
prompt that goes on from an earlier one does not know where that ended; but it ended within a run of
the last boundary that is shared, so the ends in there are asked for once that boundary is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Final

from moonstep.engine import BlockHash
from moonstep.groups import block_names, hit_blocks
from moonstep.scheduler.arrivals import Arrival
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.objects import (
    ObjectPlan,
    ObjectShape,
    Reach,
    WantedObject,
    all_of,
    objects_of,
)

_MOST_ENDS: Final = 64
"""So many boundaries before the end of whole objects are asked about, or those of one run."""


class Survey:
    """Looks at prefixes of arrivals, in the host cache and by a store's answers.

    Reads the index and changes nothing but the arrivals. Scheduler thread only.
    """

    def __init__(self, index: HostIndex, objects: ObjectPlan) -> None:
        self._index = index
        self._objects = objects

    def begin(self, arrival: Arrival) -> list[WantedObject]:
        """The objects to ask for first: what the host cache lacks of the prefix."""
        objects, request = self._objects, arrival.request
        hashes = request.block_hashes
        hashed_tokens = len(hashes) * objects.hash_tokens
        arrival.top = objects.top(request.num_tokens, hashed_tokens)
        asked: list[WantedObject] = []
        for shape in objects.dense:
            first = self._objects_here(shape, hashes, arrival.top)
            arrival.first.append(first)
            asked += all_of(shape, objects.run(shape, hashes, first, arrival.top))
        if objects.sparse and arrival.top.resume_tokens:
            resume, unit = arrival.top.resume_tokens, objects.unit_tokens
            for boundary in sorted({*range(unit, resume + 1, unit), resume}):
                asked += self._lacking(arrival, objects.at(hashes, boundary))
        return asked

    def ends_behind(self, arrival: Arrival) -> list[int]:
        """Boundaries at which an earlier prefix may have ended, ascending.

        Within a run of the last boundary that can be resumed at; and, where windows or states are
        missing, before the end of what whole objects reach, since they may be from a prompt that
        had a long answer. ``reaches`` without any end.
        """
        objects, top = self._objects, arrival.top
        unit, align = objects.unit_tokens, objects.align_tokens
        best = max((reach.resume_tokens for reach in arrival.reaches), default=0)
        whole = objects.below(arrival.whole_tokens or 0)
        of_best, of_whole = (
            range(best + align, min(start + unit, top.resume_tokens + 1), align)
            for start in (best, whole)
        )
        ends = {*of_best, *of_whole[-max(_MOST_ENDS, unit // align) :]}
        return sorted(end for end in ends if end % unit and end != top.end_tokens)

    def further(self, arrival: Arrival) -> list[WantedObject]:
        """The objects to ask for next: those of the ends that the arrival has been given.

        Of full attention only behind the whole objects, which are read before their end.
        """
        hashes, asked = arrival.request.block_hashes, list[WantedObject]()
        objects, whole = self._objects, self._objects.below(arrival.whole_tokens or 0)
        for end in arrival.ends:
            at_end = objects.at(hashes, end) if end < whole else objects.ending(hashes, end)
            asked += self._lacking(arrival, at_end)
        return asked

    def reaches(self, arrival: Arrival) -> list[Reach]:
        """Where the request can resume once what is there has come, highest first.

        Without windows and states the highest alone: all that is below it is part of it.
        """
        objects, whole = self._objects, arrival.whole_tokens
        if whole is None:
            whole = arrival.whole_tokens = self._count_whole(arrival)
        highest = objects.below(whole)
        units = range(highest, 0, -objects.unit_tokens)
        if not objects.sparse:
            units = units[:1]
        # Below the end of whole objects these are read, whether or not there is a tail as well.
        ends = [Reach(end, max(end, min(objects.above(end), highest))) for end in arrival.ends]
        reaches = {each for each in (arrival.top, *ends) if self._has_run(arrival, each)}
        reaches.update(Reach(end, end) for end in units)
        reaches.discard(Reach(0, arrival.top.end_tokens))
        ordered = sorted(reaches, key=lambda reach: (-reach.resume_tokens, reach.end_tokens))
        if not objects.sparse:
            return ordered[:1]
        return [reach for reach in ordered if self._has_ends(arrival, reach.resume_tokens)]

    def up_to(self, arrival: Arrival, reach: Reach) -> Iterator[WantedObject]:
        """All objects that a resume there reads and the host cache had not at first."""
        rows = zip(self._objects.dense, arrival.first, arrival.whole, strict=True)
        for shape, first, whole in rows:
            yield from self._read(arrival, shape, first, whole, reach)
        yield from self._objects.at(arrival.request.block_hashes, reach.resume_tokens)

    def least_here(self, arrival: Arrival) -> int:
        """Tokens from which on something has to be fetched."""
        if self._objects.sparse:
            return 0
        rows = zip(self._objects.dense, arrival.first, strict=True)
        return min(arrival.top.resume_tokens, *(shape.tokens * first for shape, first in rows))

    def _objects_here(self, shape: ObjectShape, hashes: Sequence[BlockHash], top: Reach) -> int:
        """How many of a prefix's objects the host cache has, from the first."""
        group, needed = shape.group, hit_blocks(shape.group, top.resume_tokens).stop
        names = block_names(hashes, group, 0, needed)
        run = self._index.written_run(group.index, names, 0, len(names))
        return -(-run // shape.blocks) if run == needed else run // shape.blocks

    def _count_whole(self, arrival: Arrival) -> int:
        """Note how many whole objects there are, those of the host cache and those of the store;
        how far all groups' reach, in tokens."""
        hashes, top = arrival.request.block_hashes, arrival.top
        reach = top.resume_tokens
        for shape, first in zip(self._objects.dense, arrival.first, strict=True):
            stop = hit_blocks(shape.group, top.end_tokens).stop // shape.blocks
            objects = all_of(shape, objects_of(shape, hashes, first, stop))
            run = sum(1 for _ in takewhile(lambda each: self._is_there(arrival, each), objects))
            arrival.whole.append(first + run)
            reach = min(reach, (first + run) * shape.tokens - self._objects.proof_tokens)
        return max(0, reach)

    def _read(
        self, arrival: Arrival, shape: ObjectShape, first: int, whole: int, reach: Reach
    ) -> Iterable[WantedObject]:
        """What a resume there reads of a group of full attention, from object ``first`` on.

        Whole objects where they suffice, whatever ends within the last of them.
        """
        hashes = arrival.request.block_hashes
        count = -(-hit_blocks(shape.group, reach.resume_tokens).stop // shape.blocks)
        if count <= whole:
            return all_of(shape, objects_of(shape, hashes, first, count))
        return all_of(shape, self._objects.run(shape, hashes, first, reach))

    def _has_run(self, arrival: Arrival, reach: Reach) -> bool:
        """Whether all of full attention is there that a resume there reads."""
        for shape, whole in zip(self._objects.dense, arrival.whole, strict=True):
            objects = self._read(arrival, shape, whole, whole, reach)
            if any(True for _ in self._lacking(arrival, objects)):
                return False
        return True

    def _has_ends(self, arrival: Arrival, boundary_tokens: int) -> bool:
        """Whether windows and states are there for a resume at this boundary."""
        needed = self._objects.at(arrival.request.block_hashes, boundary_tokens)
        return not any(True for _ in self._lacking(arrival, needed))

    def _lacking(self, arrival: Arrival, objects: Iterable[WantedObject]) -> Iterator[WantedObject]:
        """Those of the objects that neither the store nor the host cache has, as far as known."""
        return (each for each in objects if not self._is_there(arrival, each))

    def _is_there(self, arrival: Arrival, each: WantedObject) -> bool:
        """Whether the store or the host cache has an object, as far as known."""
        if each.mark in arrival.there:
            return True
        return self._index.has_written(each.shape.group.index, each.names.names)
