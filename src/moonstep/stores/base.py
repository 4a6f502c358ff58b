"""What a store is: a shared map from keys to bytes, narrow, batched and blocking.

A backend is any class with the verbs of :class:`Store`; nothing has to be inherited. Tests of a
backend inherit ``moonstep.stores.testing.StoreContract``, which states in code what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from moonstep.keys import Key as Key


class StoreUnwell(RuntimeError):
    """The store itself is in trouble (closed, unreachable, broken); no object is to blame.

    Whoever catches it takes the whole batch as not done, and may leave the store alone for a while.
    """

    is_told: bool = False
    """Whether the log says so already, and need not be told again."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One object on its way: which one, and the memory that its bytes come from or go to.

    ``spans`` are taken in order, and together they are the whole object. Each is a contiguous view
    of bytes (format ``B``), writable for a ``get``. They belong to the store until the call
    returns, and not a moment longer: a backend keeps no view. ``parent`` is the object before this
    one in its chain (``None`` for a head): the same key but for its last part. Backends that can
    evict tails before heads use it; the others pass over it, and so does ``get``.
    """

    key: Key
    spans: tuple[memoryview, ...]
    parent: Key | None = None

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


class Put(Enum):
    """What became of one object of a ``put``."""

    STORED = "stored"
    ALREADY_THERE = "already there"
    """An object of this key and this size was there; its bytes were neither read nor replaced."""
    NO_SPACE = "no space"
    FAILED = "failed"


class Get(Enum):
    """What became of one object of a ``get``. Only after ``HIT`` may the memory be used."""

    HIT = "hit"
    """Every byte has arrived, exactly as many as there is memory for."""
    MISS = "miss"
    DAMAGED = "damaged"
    """Something is there, but not an object of this key and this size."""
    FAILED = "failed"
    """It may be there, and could not be read this time."""


class Store(Protocol):
    """A shared map from key to bytes. Every verb takes a batch and answers in its order.

    Answers are values, one for each item, also when an item fails. ``StoreUnwell`` is raised when
    the store itself is unwell, and nothing else is raised. All verbs block. They are called from
    several threads at once, and from several processes where the URL names something shared. An
    object appears whole or not at all: no reader sees half of it. A batch lists a chain head first.
    """

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each object is there now. It may be gone by the time it is asked for."""
        ...

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        """Keep each object. The memory is only read."""
        ...

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        """Fill each item's memory. After any answer but ``HIT`` its bytes mean nothing.

        A hit counts as a use of the object and of those before it in its chain.
        """
        ...

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Remove each object. True where there was one, and now is none."""
        ...

    def close(self) -> None:
        """Let go of what the store holds. Can be called twice; no verb works afterwards.

        May block as long as the store does; whoever cannot wait calls it on a thread of its own.
        """
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as a listing shows it. ``nbytes`` is what was put."""

    key: Key
    nbytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a store is. ``capacity_bytes`` is ``None`` where nothing bounds it."""

    objects: int
    used_bytes: int
    capacity_bytes: int | None


@runtime_checkable
class Inspectable(Protocol):
    """What ``moonstep store`` needs beyond the verbs. A backend has all three or none."""

    def entries(self, namespace: str | None = None) -> Iterator[Entry]:
        """The objects of a namespace, or all; least recently used first where that is known.

        Objects that come or go meanwhile may be listed or not.
        """
        ...

    def usage(self) -> Usage:
        """Counted now; may take as long as a listing."""
        ...

    def peek(self, items: Sequence[Transfer]) -> list[Get]:
        """Like ``get``, but not counted as a use."""
        ...


@runtime_checkable
class RegistersMemory(Protocol):
    """A store that is faster, or works at all, only with memory it was told of beforehand."""

    def register(self, memory: memoryview) -> None:
        """From now on, spans may lie in ``memory``, which the caller keeps alive until ``close``.

        Called once for each region, before any thread transfers from it. Raises ``StoreUnwell``
        when the memory cannot be registered.
        """
        ...


def register(store: Store, memory: memoryview) -> None:
    """Tell a store of memory, if it is one that wants to know. Raises ``StoreUnwell``."""
    if memory.nbytes and isinstance(store, RegistersMemory):
        store.register(memory)


@runtime_checkable
class Discards(Protocol):
    """A store whose ``remove`` leaves alone what somebody reads just now."""

    def discard(self, keys: Sequence[Key]) -> list[bool]:
        """Remove objects that are damaged, whoever reads them. Answers as ``remove`` does."""
        ...


def discard(store: Store, keys: Sequence[Key]) -> list[bool]:
    """Remove damaged objects from a store, in whichever way it has."""
    return store.discard(keys) if isinstance(store, Discards) else store.remove(keys)


def namespace_of(key: Key) -> str:
    """The namespace a key belongs to.

    >>> namespace_of(Key("tenant/0123/0.0/abcd"))
    'tenant'
    """
    return key.partition("/")[0]
