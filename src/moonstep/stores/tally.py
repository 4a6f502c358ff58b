"""Failures of a store by kind: all are counted, and the first of a kind is worth a log line."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """How often each kind of failure has come. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Such as ``{"put ENOSPC": 3}``."""
        with self._lock:
            return dict(self._counts)

    def is_first(self, kind: str) -> bool:
        """Count one of this kind; whether there was none before."""
        with self._lock:
            self._counts[kind] += 1
            return self._counts[kind] == 1
