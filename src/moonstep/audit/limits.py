"""When waiting turns into a finding."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Limits:
    """Steps without progress, unanswered lookups, steps until all is drained.

    Where threads have to come by for anything to move, ``stalled_s`` must have passed as well: a
    busy machine may keep them waiting while the engine steps.
    """

    stalled_steps: int = 600
    stalled_s: float = 20.0
    passed_over: int = 1000
    drain_steps: int = 60_000


class QuietTime:
    """For how long nothing has moved."""

    def __init__(self, limits: Limits, *, threads: bool) -> None:
        self.steps = 0
        self._limits = limits
        self._wait_s = limits.stalled_s if threads else 0.0
        self._since_s = time.monotonic()

    def note(self, progress: bool) -> None:
        """A step has ended, with progress or without."""
        if progress:
            self.steps, self._since_s = 0, time.monotonic()
        else:
            self.steps += 1

    @property
    def is_stalled(self) -> bool:
        """Whether it has been too long."""
        waited_s = time.monotonic() - self._since_s
        return self.steps > self._limits.stalled_steps and waited_s >= self._wait_s
