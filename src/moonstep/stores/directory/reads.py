"""What was read and is not marked as used yet: nobody who fetches waits for a mark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from moonstep.stores.base import Key

DELAY_S: Final = 2.0
"""How long after it was read an object is marked, at most: nothing against the hours after which
objects are evicted. A process that is killed forgets so much of the order, and nothing else."""
MOST_UNMARKED: Final = 1 << 14
"""Objects, some 200 bytes each; beyond that, whoever reads marks."""


class Reads(NamedTuple):
    """The objects of one batch that were read, in its order, and when they were asked for.

    For each the last part of its parent's key; empty where there is none.
    """

    now_ns: int
    parents: dict[Key, str]


class UnmarkedReads:
    """Keeps batches of reads and has them marked a moment later, by a thread of its own.

    ``mark`` is called for one batch at a time and raises nothing. Safe from any thread.
    """

    def __init__(self, mark: Callable[[Reads], None], delay_s: float = DELAY_S) -> None:
        self._mark = mark
        self._delay_s = delay_s
        self._marking = threading.Lock()
        """Held while marking, so that whoever wants all marked waits for what another has begun."""
        self._lock = threading.Lock()
        self._batches: list[Reads] = []
        self._objects = 0
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def add(self, reads: Reads) -> None:
        """Mark these in a moment; once closed, not at all."""
        if not reads.parents:
            return
        with self._lock:
            if self._is_closed:
                return
            self._batches.append(reads)
            self._objects += len(reads.parents)
            can_wait = self._objects < MOST_UNMARKED and self._has_timer()
        if not can_wait:
            self.mark()

    def close(self) -> None:
        """Mark what is not marked yet, and nothing that is read from now on."""
        with self._lock:
            self._is_closed = True
        self.mark()

    def mark(self) -> None:
        """Mark now whatever is not marked yet. Afterwards no thread is left waiting to do it."""
        with self._marking:
            with self._lock:
                batches, self._batches, self._objects = self._batches, [], 0
                timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            # The latest first: what was read again since then needs no earlier mark.
            for reads in reversed(batches):
                self._mark(reads)

    def _has_timer(self) -> bool:
        """Whether a thread will mark in a moment. With the lock held."""
        if self._timer is None or not self._timer.is_alive():  # a fork leaves it behind
            timer = threading.Timer(self._delay_s, self.mark)
            timer.name, timer.daemon = "moonstep-uses", True
            try:
                timer.start()
            except RuntimeError:
                # No more threads to be had, or the interpreter ends.
                return False
            self._timer = timer
        return True
