"""How fast a Mooncake Store fills, by its master's own metrics."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final, Self

from moonstep.stores.base import StoreUnwell
from moonstep.stores.mooncake.master import Address
from moonstep.stores.mooncake.metrics import read_status

_EVERY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that were put, and the seconds from the first put to the last."""

    nbytes: int
    seconds: float


def growth_of(samples: list[tuple[float, int]]) -> Growth:
    """From samples ``(when, bytes in use)``, the first of them before any put.

    >>> growth_of([(1.0, 10), (2.0, 10), (3.0, 30), (4.0, 50), (5.0, 50)])
    Growth(nbytes=40, seconds=2.0)
    """
    grew = [at for at in range(1, len(samples)) if samples[at][1] > samples[at - 1][1]]
    if not grew:
        return Growth(0, 0.0)
    first, last = samples[grew[0] - 1], samples[grew[-1]]
    return Growth(last[1] - first[1], last[0] - first[0])


class GrowthWatch:
    """Reads the metrics twenty times a second, on a thread of its own, within a ``with`` block."""

    def __init__(self, metrics: Address) -> None:
        self._metrics = metrics
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-growth", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> Growth:
        """What was put until now."""
        return growth_of(list(self._samples))

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            try:
                used_bytes = read_status(self._metrics).used_bytes
            except StoreUnwell:
                continue
            self._samples.append((time.perf_counter(), used_bytes))
