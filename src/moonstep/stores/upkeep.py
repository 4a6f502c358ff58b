"""What an operator does with a store: see how full it is, check it, clear a namespace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from moonstep.stores.base import Entry, Get, Inspectable, Store, Transfer, namespace_of

BATCH_BYTES: Final = 32 << 20
BATCH_OBJECTS: Final = 256


class InspectableStore(Store, Inspectable, Protocol):
    """A store that can list what it keeps."""


@dataclass(slots=True)
class NamespaceUsage:
    objects: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """One object that was read and checked. ``MISS``: it went while we looked."""

    entry: Entry
    answer: Get


def usage_by_namespace(store: Inspectable) -> dict[str, NamespaceUsage]:
    """Objects and their bytes, by namespace in alphabetical order."""
    found: dict[str, NamespaceUsage] = {}
    for entry in store.entries():
        usage = found.setdefault(namespace_of(entry.key), NamespaceUsage())
        usage.objects += 1
        usage.nbytes += entry.nbytes
    return dict(sorted(found.items()))


def verify(store: Inspectable, namespace: str | None = None) -> Iterator[Verified]:
    """Read every object, without using it. Damage is found, and removed, by a checked store."""
    for batch in _batches(store.entries(namespace)):
        memory = [memoryview(bytearray(entry.nbytes)) for entry in batch]
        transfers = [
            Transfer(entry.key, (view,)) for entry, view in zip(batch, memory, strict=True)
        ]
        for entry, answer in zip(batch, store.peek(transfers), strict=True):
            yield Verified(entry, answer)


def remove_namespace(store: InspectableStore, namespace: str) -> Iterator[int]:
    """Remove every object of a namespace. Yields how many went with each batch."""
    for batch in _batches(store.entries(namespace)):
        yield sum(store.remove([entry.key for entry in batch]))


def _batches(entries: Iterator[Entry]) -> Iterator[Sequence[Entry]]:
    batch: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if batch and (nbytes + entry.nbytes > BATCH_BYTES or len(batch) == BATCH_OBJECTS):
            yield batch
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += entry.nbytes
    if batch:
        yield batch
