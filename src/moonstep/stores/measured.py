"""Counts and times of a store's calls, by wrapping: the stores themselves measure nothing."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from moonstep.stores.base import Get, Key, Put, Store, Transfer, discard, register

LATENCY_BOUNDS_S: Final = (0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 20.0)
"""Upper bounds of the latency counts; the last count is of what took longer."""

MOST_DURATIONS: Final = 10_000
"""Durations that are remembered until somebody takes them."""


@dataclass(slots=True)
class VerbStats:
    """Totals of one verb since the start.

    ``nbytes`` counts only what arrived or was stored. ``outcomes`` counts objects by their answers'
    values (``True`` and ``False`` where the answers are those). ``in_progress`` calls have not
    returned; a store that hangs shows there. ``latencies[i]`` counts the calls that took up to
    ``LATENCY_BOUNDS_S[i]`` and longer than the bound before.
    """

    calls: int = 0
    in_progress: int = 0
    unwell: int = 0
    objects: int = 0
    nbytes: int = 0
    ns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))

    def copy(self) -> VerbStats:
        return VerbStats(
            self.calls,
            self.in_progress,
            self.unwell,
            self.objects,
            self.nbytes,
            self.ns,
            Counter(self.outcomes),
            list(self.latencies),
        )


@dataclass(slots=True)
class _Call:
    outcomes: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0


class MeasuredStore:
    """A :class:`Store` around a store. ``clock_ns`` need not be the time of day."""

    def __init__(self, inner: Store, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._inner = inner
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._stats = {verb: VerbStats() for verb in ("contains", "put", "get", "remove")}
        self._durations_ns: dict[str, deque[int]] = {
            verb: deque(maxlen=MOST_DURATIONS) for verb in self._stats
        }

    def stats(self) -> dict[str, VerbStats]:
        """Totals by verb, as they are now."""
        with self._lock:
            return {verb: stats.copy() for verb, stats in self._stats.items()}

    def stats_of(self, verb: str) -> VerbStats:
        """Totals of one verb, as they are now."""
        with self._lock:
            return self._stats[verb].copy()

    def take_durations_ns(self, verb: str) -> tuple[int, ...]:
        """How long the calls took that ended since this was asked last, each of them once."""
        with self._lock:
            durations_ns = tuple(self._durations_ns[verb])
            self._durations_ns[verb].clear()
        return durations_ns

    def register(self, memory: memoryview) -> None:
        register(self._inner, memory)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._measured("contains", len(keys)) as call:
            found = self._inner.contains(keys)
            call.outcomes.update(map(str, found))
        return found

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        with self._measured("put", len(items)) as call:
            answers = self._inner.put(items)
            call.outcomes.update(answer.value for answer in answers)
            call.nbytes = _bytes_of(items, answers, Put.STORED)
        return answers

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        with self._measured("get", len(items)) as call:
            answers = self._inner.get(items)
            call.outcomes.update(answer.value for answer in answers)
            call.nbytes = _bytes_of(items, answers, Get.HIT)
        return answers

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        with self._measured("remove", len(keys)) as call:
            removed = self._inner.remove(keys)
            call.outcomes.update(map(str, removed))
        return removed

    def discard(self, keys: Sequence[Key]) -> list[bool]:
        """Counts as a ``remove``."""
        with self._measured("remove", len(keys)) as call:
            removed = discard(self._inner, keys)
            call.outcomes.update(map(str, removed))
        return removed

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _measured(self, verb: str, objects: int) -> Iterator[_Call]:
        stats, call, start_ns, is_well = self._stats[verb], _Call(), self._clock_ns(), False
        with self._lock:
            stats.in_progress += 1
        try:
            yield call
            is_well = True
        finally:
            ns = self._clock_ns() - start_ns
            with self._lock:
                stats.in_progress -= 1
                stats.calls += 1
                stats.unwell += not is_well
                stats.objects += objects
                stats.nbytes += call.nbytes
                stats.ns += ns
                self._durations_ns[verb].append(ns)
                stats.outcomes.update(call.outcomes)
                stats.latencies[latency_index(ns)] += 1


def latency_index(ns: int) -> int:
    """
    >>> [latency_index(ns) for ns in (0, 500_000, 500_001, 10**11)]
    [0, 0, 1, 8]
    """
    return bisect_left(LATENCY_BOUNDS_S, ns / 1e9)


def _bytes_of(items: Sequence[Transfer], answers: Sequence[Put | Get], good: Put | Get) -> int:
    # A store that gives too few answers is dealt with by whoever reads them.
    return sum(item.nbytes for item, answer in zip(items, answers, strict=False) if answer is good)
