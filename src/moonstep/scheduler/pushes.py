"""Pushes: which objects go from the host cache to the store, and when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from moonstep.engine import BlockHash
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.jobs import OpenJob
from moonstep.scheduler.objects import ObjectNames
from moonstep.wire import StoredObject

OBJECTS_PER_JOB: Final = 8
_MOST_KNOWN: Final = 1 << 20
_MOST_QUEUED: Final = 4096


class KnownObjects:
    """Names of objects that the store had when we last heard; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[int, BlockHash], None] = OrderedDict()

    def __contains__(self, item: tuple[int, BlockHash]) -> bool:
        return item in self._names

    def add(self, group: int, name: BlockHash) -> None:
        self._names[(group, name)] = None
        self._names.move_to_end((group, name))
        if len(self._names) > _MOST_KNOWN:
            self._names.popitem(last=False)

    def discard(self, group: int, name: BlockHash) -> None:
        self._names.pop((group, name), None)


class _Wanted(NamedTuple):
    request_id: str
    group: int
    names: ObjectNames


@dataclass(slots=True)
class PushCounts:
    """What pushing has come to since the start, in objects if not said otherwise."""

    started: int = 0
    stored: int = 0
    failed: int = 0
    abandoned_jobs: int = 0
    dropped_full: int = 0
    """Not queued, or pushed out of the queue by a head, because the queue was full."""
    dropped_gone: int = 0
    """Evicted from the host cache before their turn came."""


@dataclass(slots=True)
class Stocktaking:
    """What is known of the objects under one set of keys: in the store, or on their way there."""

    known: KnownObjects = field(default_factory=KnownObjects)
    on_the_way: set[tuple[int, BlockHash]] = field(default_factory=set)


class PushQueue:
    """Objects that wait to be pushed. Scheduler thread only.

    Bounded: when it is full, tails are dropped before heads.
    """

    def __init__(self, index: HostIndex) -> None:
        self.counts = PushCounts()
        self.stock = Stocktaking()
        self._index = index
        self._queue: deque[_Wanted] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, request_id: str, group: int, objects: Sequence[ObjectNames]) -> None:
        """Push these, head first, unless the store has them or they are on their way."""
        for names in objects:
            mark = (group, names.name)
            if mark in self.stock.known or mark in self.stock.on_the_way:
                continue
            if len(self._queue) >= _MOST_QUEUED and not self._make_room(names.number):
                self.counts.dropped_full += 1
                continue
            self.stock.on_the_way.add(mark)
            self._queue.append(_Wanted(request_id, group, names))

    def take(self, most_objects: int) -> Iterator[tuple[str, list[StoredObject]]]:
        """Batches of what can be pushed now, each of one request; their slots are pinned."""
        batch: list[StoredObject] = []
        owner = ""
        while self._queue and most_objects > 0:
            wanted = self._queue.popleft()
            stored = self._located(wanted)
            if stored is None:
                continue
            if batch and (wanted.request_id != owner or len(batch) == OBJECTS_PER_JOB):
                yield owner, batch
                batch = []
            owner = wanted.request_id
            batch.append(stored)
            most_objects -= 1
        if batch:
            yield owner, batch

    def ended(self, entry: OpenJob[Stocktaking]) -> None:
        """A push came back from every rank: its slots are let go.

        What it has come to is true of the keys it was started under, which may be new by now.
        """
        stock = entry.detail
        for stored, done in zip(entry.job.objects, entry.done, strict=True):
            self._index.unpin(stored.slots)
            stock.on_the_way.discard((stored.group, stored.name))
            if done:
                self.counts.stored += 1
                stock.known.add(stored.group, stored.name)
            else:
                self.counts.failed += 1

    def reset(self) -> None:
        """New keys: nothing is known of the store, and what waits is from before."""
        self._queue.clear()
        self.stock = Stocktaking()

    def _located(self, wanted: _Wanted) -> StoredObject | None:
        try:
            slots, _ = self._index.locate(wanted.group, wanted.names.names)
        except KeyError:
            self.stock.on_the_way.discard((wanted.group, wanted.names.name))
            self.counts.dropped_gone += 1
            return None
        self._index.pin(slots)
        self.counts.started += 1
        names = wanted.names
        return StoredObject(wanted.group, names.name, names.parent, tuple(slots))

    def _make_room(self, number: int) -> bool:
        """Drop the deepest object that waits, if it is deeper than ``number``."""
        deepest = max(self._queue, key=lambda wanted: wanted.names.number)
        if deepest.names.number <= number:
            return False
        self._queue.remove(deepest)
        self.stock.on_the_way.discard((deepest.group, deepest.names.name))
        self.counts.dropped_full += 1
        return True


class Bucket:
    """Bytes a second: how much may be pushed now. ``None``: as much as there is.

    It holds what a second earns, or one object where that is more: else none would ever go.
    """

    def __init__(self, bytes_per_s: int | None, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._left_bytes = float(bytes_per_s or 0)
        self._then_s = now_s

    def objects(self, object_bytes: int, now_s: float, most: int) -> int:
        """How many objects of this size may go now."""
        if self._bytes_per_s is None:
            return most
        earned = (now_s - self._then_s) * self._bytes_per_s
        most_bytes = float(max(self._bytes_per_s, object_bytes))
        self._left_bytes = min(most_bytes, self._left_bytes + earned)
        self._then_s = now_s
        return min(most, int(self._left_bytes // object_bytes))

    def spend(self, nbytes: int) -> None:
        """These bytes are on their way."""
        if self._bytes_per_s is not None:
            self._left_bytes -= nbytes
