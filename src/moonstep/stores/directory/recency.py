"""When objects were last used, kept so that a chain's tail is always older than its head."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moonstep.stores.base import Key
from moonstep.stores.directory.objectfile import read_parent, sibling
from moonstep.stores.directory.tree import Tree

STEP_NS: Final = 1_000
"""How much older an object is than the one before it in a batch."""
AHEAD_NS: Final = 2_000_000_000
"""How far ahead of its use a head is marked, so that not every push of its tail has to touch it
again. Nothing against the hours after which objects are evicted."""
MOST_KNOWN: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Use:
    """An object that was stored or read, when, and the one before it in its chain."""

    key: Key
    parent: Key | None
    used_ns: int


@dataclass(frozen=True, slots=True)
class _Mark:
    used_ns: int
    parent: Key | None


class Recency:
    """Marks uses as times of last change: whoever evicts sees them, in whatever process.

    The objects before a used one count as used too, to the head of the chain. Where that chain goes
    is in the footers; what this process has seen of them it remembers. Safe from any thread.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._marks: dict[Key, _Mark] = {}

    def touch(self, uses: Sequence[Use]) -> None:
        """Mark the uses. What is gone meanwhile is passed over."""
        for use in uses:
            self._mark(use.key, use.used_ns, use.parent)

    def remember(self, use: Use) -> None:
        """The object has just been written, with this very time."""
        self._set(use.key, _Mark(use.used_ns, use.parent))

    def touch_heads(self, uses: Sequence[Use], now_ns: int) -> None:
        """Mark all that comes before a batch's objects in their chains."""
        within = {use.key for use in uses}
        for use in uses:
            if use.parent is not None and use.parent not in within:
                self._touch_upwards(use.parent, now_ns)

    def _touch_upwards(self, key: Key | None, now_ns: int) -> None:
        steps = 0
        while key is not None and steps < MOST_KNOWN:
            mark = self._get(key)
            if mark is not None and mark.used_ns > now_ns + steps * STEP_NS:
                # Marked ahead a moment ago, and so was all that comes before it.
                return
            parent = mark.parent if mark is not None else self._parent_on_disk(key)
            steps += 1
            if not self._mark(key, now_ns + AHEAD_NS + steps * STEP_NS, parent):
                return
            key = parent

    def _mark(self, key: Key, used_ns: int, parent: Key | None) -> bool:
        known = self._get(key)
        if known is not None and known.used_ns >= used_ns:
            return True
        try:
            os.utime(self._tree.path(key), ns=(used_ns, used_ns), follow_symlinks=False)
        except OSError:
            self._forget(key)
            return False
        self._set(key, _Mark(used_ns, parent))
        return True

    def _parent_on_disk(self, key: Key) -> Key | None:
        try:
            return sibling(key, read_parent(self._tree.path(key)))
        except OSError:
            return None

    def _get(self, key: Key) -> _Mark | None:
        with self._lock:
            return self._marks.get(key)

    def _set(self, key: Key, mark: _Mark) -> None:
        with self._lock:
            if len(self._marks) >= MOST_KNOWN:
                # Rare, and what is forgotten can be read again.
                self._marks.clear()
            self._marks[key] = mark

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._marks.pop(key, None)


def used_ns(now_ns: int, index: int) -> int:
    """The time of use of the object at ``index`` in a batch.

    >>> [used_ns(10_000, index) for index in range(3)]
    [10000, 9000, 8000]
    """
    return now_ns - index * STEP_NS
