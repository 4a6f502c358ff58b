"""A store in this process's memory, ``memory://NAME?capacity=64MiB``: for tests and audits.

Stores of the same name are one store, for as long as the process lives, so that both halves of a
connector meet in it and a second connector finds what a first one left. Without a name each opening
makes a store of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

from moonstep.stores.base import Entry, Get, Key, Put, StoreUnwell, Transfer, Usage, namespace_of
from moonstep.stores.urls import Opener, StoreUrl


class Shelf:
    """The objects themselves, least recently used first, with the lock that guards them."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._objects: dict[Key, bytes] = {}
        self._used_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._objects

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._objects), self._used_bytes, self.capacity_bytes)

    def entries(self) -> list[Entry]:
        with self._lock:
            return [Entry(key, len(payload)) for key, payload in self._objects.items()]

    def add(self, key: Key, payload: bytes) -> Put:
        with self._lock:
            known = self._objects.get(key)
            if known is not None and len(known) == len(payload):
                self._touch(key)
                return Put.ALREADY_THERE
            if self.capacity_bytes is not None and len(payload) > self.capacity_bytes:
                return Put.NO_SPACE
            self._drop(key)
            self._make_room(len(payload))
            self._objects[key] = payload
            self._used_bytes += len(payload)
            return Put.STORED

    def read(self, key: Key, *, touch: bool) -> bytes | None:
        with self._lock:
            payload = self._objects.get(key)
            if payload is not None and touch:
                self._touch(key)
            return payload

    def discard(self, key: Key) -> bool:
        with self._lock:
            return self._drop(key)

    def _touch(self, key: Key) -> None:
        self._objects[key] = self._objects.pop(key)

    def _drop(self, key: Key) -> bool:
        payload = self._objects.pop(key, None)
        self._used_bytes -= len(payload or b"")
        return payload is not None

    def _make_room(self, nbytes: int) -> None:
        while self.capacity_bytes is not None and self._used_bytes + nbytes > self.capacity_bytes:
            self._drop(next(iter(self._objects)))


class MemoryStore:
    """A :class:`Store` on a shelf. Within a batch, tails count as less recently used than heads."""

    def __init__(self, capacity_bytes: int | None = None, shelf: Shelf | None = None) -> None:
        self._shelf = Shelf(capacity_bytes) if shelf is None else shelf
        self._is_closed = False

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        return [key in self._shelf for key in keys]

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        self._check_open()
        answers = [self._shelf.add(item.key, b"".join(item.spans)) for item in items]
        self._touch_heads_last([item.key for item in items])
        return answers

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        answers = self.peek(items)
        self._touch_heads_last([item.key for item in items])
        return answers

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        return [self._shelf.discard(key) for key in keys]

    def close(self) -> None:
        self._is_closed = True

    def entries(self, namespace: str | None = None) -> Iterator[Entry]:
        self._check_open()
        for entry in self._shelf.entries():
            if namespace is None or namespace_of(entry.key) == namespace:
                yield entry

    def usage(self) -> Usage:
        self._check_open()
        return self._shelf.usage()

    def peek(self, items: Sequence[Transfer]) -> list[Get]:
        self._check_open()
        return [self._fill(item) for item in items]

    def _fill(self, item: Transfer) -> Get:
        payload = self._shelf.read(item.key, touch=False)
        if payload is None:
            return Get.MISS
        if len(payload) != item.nbytes:
            return Get.DAMAGED
        rest = memoryview(payload)
        for span in item.spans:
            span[:], rest = rest[: span.nbytes], rest[span.nbytes :]
        return Get.HIT

    def _touch_heads_last(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._shelf.read(key, touch=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnwell("the memory store is closed")


_shelves: Final[dict[str, Shelf]] = {}
_shelves_lock: Final = threading.Lock()


def forget(name: str) -> None:
    """Let the objects of a named memory store go. For tests."""
    with _shelves_lock:
        _shelves.pop(name, None)


def backend(url: StoreUrl) -> Opener:
    """``memory://NAME?capacity=SIZE``; both may be left out."""
    url.check_params(("capacity",))
    if url.path not in ("", "/"):
        raise url.error('a memory store has a name and no path: "memory://NAME"')
    capacity_bytes = url.size("capacity")

    def open_memory() -> MemoryStore:
        if not url.host:
            return MemoryStore(capacity_bytes)
        with _shelves_lock:
            shelf = _shelves.setdefault(url.host, Shelf(capacity_bytes))
        return MemoryStore(shelf=shelf)

    return open_memory
