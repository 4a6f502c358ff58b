"""Looking into a store off the scheduler's thread: a thread that only ever asks ``contains``."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from moonstep.stores.base import Key, Store, StoreUnwell

logger = logging.getLogger(__name__)


class LookupThread(threading.Thread):
    """Asks a store what it has, one look after the other. Its verbs never block.

    A look that fails is logged and finds nothing. While one look hangs the others wait behind it,
    and their requests go on when their time is up.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(name="moonstep-lookup", daemon=True)
        self._store = store
        self._looks: queue.Queue[tuple[int, Sequence[Key]] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._answers: list[tuple[int, list[bool]]] = []

    def ask(self, ticket: int, keys: Sequence[Key]) -> None:
        """Look for ``keys``; the answer comes under ``ticket``."""
        self._looks.put((ticket, keys))

    def answers(self) -> list[tuple[int, list[bool]]]:
        """What has been found since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def close(self, deadline_s: float) -> bool:
        """End the thread after the look under way, waiting at most ``deadline_s``."""
        self._looks.put(None)
        self.join(deadline_s)
        return not self.is_alive()

    def run(self) -> None:
        while True:
            look = self._looks.get()
            try:
                if look is None:
                    self._close_store()
                    return
                self._look(*look)
            finally:
                self._looks.task_done()

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception:
            logger.exception("%s: closing the store failed", self.name)

    def _look(self, ticket: int, keys: Sequence[Key]) -> None:
        try:
            present = self._store.contains(keys)
        except StoreUnwell:
            present = []  # the job threads of the workers say so, once
        except Exception:
            logger.exception("%s: looking for %d objects failed", self.name, len(keys))
            present = []
        with self._lock:
            self._answers.append((ticket, present))


class NoLooks:
    """What an engine that fetches nothing has in place of a :class:`LookupThread`."""

    def ask(self, ticket: int, keys: Sequence[Key]) -> None:
        """Never answered, so its request waits for nothing beyond its deadline."""

    def answers(self) -> list[tuple[int, list[bool]]]:
        return []

    def close(self, deadline_s: float) -> bool:
        return True
