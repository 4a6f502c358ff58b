"""When objects were last used, kept so that a chain's tail is always older than its head."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from moonstep.stores.base import Key
from moonstep.stores.directory.objectfile import read_parent, sibling
from moonstep.stores.directory.reads import Reads
from moonstep.stores.directory.tree import Tree

STEP_NS: Final = 1_000
"""How much older an object is, at least, than the one before it in its chain."""
AHEAD_NS: Final = 2_000_000_000
"""How far ahead of its use a head is marked, so that not every push of its tail has to touch it
again. Nothing against the hours after which objects are evicted."""
NEVER_NS: Final = (1 << 63) - 1
"""Later than every use."""
MOST_KNOWN: Final = 1 << 15
"""Parents held in memory, some 300 bytes each; also the longest chain that is followed."""


class Use(NamedTuple):
    """An object that was stored or read, when, and the one before it in its chain."""

    key: Key
    parent: Key | None
    used_ns: int


class Recency:
    """Marks uses as times of last change: whoever evicts sees them, in whatever process.

    The objects before a used one count as used too, to the head of the chain. Where that chain goes
    is in the footers; what this process has seen of them it remembers. No time is ever set back,
    and what is marked is marked from the head down, so that whenever a process is killed, a head is
    younger than its tail. Safe from any thread.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._parents: dict[Key, Key | None] = {}

    def touch_reads(self, reads: Reads) -> None:
        """Mark what was read, and all that comes before it."""
        uses = [
            Use(key, sibling(key, parent), used_ns(reads.now_ns, index))
            for index, (key, parent) in enumerate(reads.parents.items())
        ]
        self.touch_heads(uses, reads.now_ns)
        self.touch(uses)

    def touch(self, uses: Sequence[Use]) -> None:
        """Mark the uses. What is gone is passed over."""
        self.remember(uses)
        for use in uses:
            self._raise(use.key, use.used_ns)

    def remember(self, uses: Sequence[Use]) -> None:
        """Where the chains of these objects go, as was just seen or written."""
        with self._lock:
            if len(self._parents) >= MOST_KNOWN:
                # Rare, and what is forgotten can be read again.
                self._parents.clear()
            for use in uses:
                self._parents[use.key] = use.parent

    def touch_heads(self, uses: Sequence[Use], now_ns: int) -> int:
        """Mark all that comes before a batch's objects in their chains.

        Returns the oldest mark that an object of these chains bears; ``NEVER_NS`` for none.
        """
        within = {use.key for use in uses}
        oldest_ns = NEVER_NS
        for use in uses:
            if use.parent is not None and use.parent not in within:
                oldest_ns = min(oldest_ns, self._touch_upwards(use.parent, now_ns))
        return oldest_ns

    def _touch_upwards(self, key: Key | None, now_ns: int) -> int:
        """Mark ``key`` and all before it, up to one that was marked ahead a moment ago.

        Returns the mark of ``key``: nothing before it bears an older one.
        """
        stale: dict[Key, None] = {}
        above_ns = 0
        while key is not None and key not in stale and len(stale) < MOST_KNOWN:
            used_ns = self._used_ns(key)
            if used_ns is None:
                break
            if used_ns > now_ns + (len(stale) + 1) * STEP_NS:
                above_ns = used_ns
                break
            stale[key] = None
            key = self._parent(key)
        if not stale:
            return above_ns or NEVER_NS
        above_ns = above_ns or now_ns + AHEAD_NS + (len(stale) + 1) * STEP_NS
        for index, each in enumerate(reversed(stale), start=1):
            self._raise(each, above_ns - index * STEP_NS)
        return above_ns - len(stale) * STEP_NS

    def _raise(self, key: Key, used_ns: int) -> None:
        try:
            path = self._tree.path(key)
            if os.stat(path, follow_symlinks=False).st_mtime_ns < used_ns:
                os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)
        except OSError:
            return

    def _used_ns(self, key: Key) -> int | None:
        try:
            return os.stat(self._tree.path(key), follow_symlinks=False).st_mtime_ns
        except OSError:
            return None

    def _parent(self, key: Key) -> Key | None:
        with self._lock:
            if key in self._parents:
                return self._parents[key]
        try:
            return sibling(key, read_parent(self._tree.path(key)))
        except OSError:
            return None


def used_ns(now_ns: int, index: int) -> int:
    """The time of use of the object at ``index`` in a batch.

    >>> [used_ns(10_000, index) for index in range(3)]
    [10000, 9000, 8000]
    """
    return now_ns - index * STEP_NS
