"""Checked objects: a header around every object, verified before its bytes may be used.

``CheckedStore(store)`` is the only way in which Moonstep reads and writes a store. Whatever the
store answers, a ``HIT`` from here means that the memory holds the very bytes that were put under
this key. Everything else is a miss for the request; a bad object is removed, so that it can be put
again, counted, and logged once.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from moonstep.stores.base import (
    Entry,
    Get,
    Inspectable,
    Key,
    Put,
    Store,
    StoreUnwell,
    Transfer,
    Usage,
    discard,
    register,
)
from moonstep.stores.header import HEADER_BYTES, Damage, seal, verify

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", Put, Get)

_HIT: Final = Get.HIT
BATCH_OBJECTS: Final = 1024
"""Headers that a thread has memory for; a longer batch is cut into several."""
MOST_LOGGED_KEYS: Final = 10_000
"""Beyond so many damaged objects they are only counted."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """One object that was not what its key says, and why. ``None``: the store itself said so."""

    key: Key
    damage: Damage | None

    def __str__(self) -> str:
        return "its size or frame is wrong" if self.damage is None else self.damage.value


class DamageBook:
    """Counts damaged objects by reason, and logs each key once. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Damage | None] = Counter()
        self._logged: set[Key] = set()

    @property
    def count(self) -> int:
        """Damaged objects since the start."""
        with self._lock:
            return self._counts.total()

    def by_reason(self) -> dict[str, int]:
        with self._lock:
            counts = dict(self._counts)
        return {str(Damaged(Key(""), damage)): count for damage, count in counts.items()}

    def write(self, found: Damaged) -> None:
        with self._lock:
            self._counts[found.damage] += 1
            is_new = found.key not in self._logged and len(self._logged) < MOST_LOGGED_KEYS
            if is_new:
                self._logged.add(found.key)
        if is_new:
            logger.warning("damaged object removed from the store: %s: %s", found.key, found)


class CheckedStore:
    """A :class:`Store` around a store. Its ``nbytes`` are payload bytes, without the header.

    The checksums are computed on the calling thread. Headers lie in memory of the calling thread
    that the store is told of once (``RegistersMemory``), so a call that hangs keeps its own.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.damaged = DamageBook()
        self._scratch = threading.local()

    def register(self, memory: memoryview) -> None:
        """Tell the store of memory, if it is one that wants to know."""
        register(self._inner, memory)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return self._inner.contains(keys)

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        answers: list[Put] = []
        for batch in _batches(items):
            framed = self._framed(batch)
            for item, frame in zip(batch, framed, strict=True):
                frame.spans[0][:] = seal(item.key, item.spans)
            answers += _answers("put", self._inner.put(framed), len(batch))
        return answers

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        return self._verified(items, self._inner.get)

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        return self._inner.remove(keys)

    def close(self) -> None:
        self._inner.close()

    def _verified(
        self, items: Sequence[Transfer], get: Callable[[Sequence[Transfer]], list[Get]]
    ) -> list[Get]:
        answers: list[Get] = []
        for batch in _batches(items):
            framed = self._framed(batch)
            # Nothing left from an earlier object may pass for this one's header.
            self._headers()[: len(batch) * HEADER_BYTES] = bytes(len(batch) * HEADER_BYTES)
            got = _answers("get", get(framed), len(batch))
            damaged: list[Damaged] = []
            answers += [
                _check(item, frame, answer, damaged)
                for item, frame, answer in zip(batch, framed, got, strict=True)
            ]
            self._discard(damaged)
        return answers

    def _framed(self, batch: Sequence[Transfer]) -> list[Transfer]:
        """The same transfers with memory for the header in front."""
        memory = self._headers()
        starts = range(0, len(batch) * HEADER_BYTES, HEADER_BYTES)
        return [
            Transfer(item.key, (memory[start : start + HEADER_BYTES], *item.spans), item.parent)
            for start, item in zip(starts, batch, strict=True)
        ]

    def _headers(self) -> memoryview:
        """Memory of this thread for the headers of a batch."""
        memory: memoryview | None = getattr(self._scratch, "headers", None)
        if memory is None:
            memory = memoryview(bytearray(BATCH_OBJECTS * HEADER_BYTES))
            self.register(memory)
            self._scratch.headers = memory
        return memory

    def _discard(self, damaged: Sequence[Damaged]) -> None:
        if not damaged:
            return
        for found in damaged:
            self.damaged.write(found)
        try:
            discard(self._inner, [found.key for found in damaged])
        except StoreUnwell:
            logger.warning("%d damaged objects could not be removed", len(damaged), exc_info=True)


class CheckedInspection(CheckedStore):
    """The same around a store that can be inspected, and it can be inspected as well."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        if not isinstance(inner, Inspectable):
            raise TypeError(f"a {type(inner).__name__} cannot list its objects")
        self._inspected: Inspectable = inner

    def entries(self, namespace: str | None = None) -> Iterator[Entry]:
        """As the store lists them; an object too short for a header counts as empty."""
        for entry in self._inspected.entries(namespace):
            yield Entry(entry.key, max(0, entry.nbytes - HEADER_BYTES))

    def usage(self) -> Usage:
        return self._inspected.usage()

    def peek(self, items: Sequence[Transfer]) -> list[Get]:
        return self._verified(items, self._inspected.peek)


def _check(item: Transfer, frame: Transfer, got: Get, damaged: list[Damaged]) -> Get:
    """The answer, once a hit is verified; what is damaged is added to the damaged."""
    if got is _HIT:
        damage = verify(item.key, frame.spans[0], item.spans)
        if damage is None:
            return _HIT
        damaged.append(Damaged(item.key, damage))
        return Get.DAMAGED
    if got is Get.DAMAGED:
        damaged.append(Damaged(item.key, None))
    return got


def _batches(items: Sequence[Transfer]) -> Iterator[Sequence[Transfer]]:
    for start in range(0, len(items), BATCH_OBJECTS):
        yield items[start : start + BATCH_OBJECTS]


def _answers(verb: str, answers: list[Answer], count: int) -> list[Answer]:
    """The answers, if there is one for each item: with fewer, nobody can tell whose they are."""
    if len(answers) != count:
        raise StoreUnwell(f"{verb} of {count} objects gave {len(answers)} answers")
    return answers
