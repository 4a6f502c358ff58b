"""The tier without quarantine: what an abandoned job owned is given away at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from moonstep.scheduler.tier import StoreTier


@contextmanager
def without_quarantine(*kinds: str) -> Iterator[None]:
    """A deadline ends not only the waiting, but the ownership: of ``push`` or ``fetch`` jobs."""
    plan = StoreTier.plan

    def releasing(self: StoreTier, new_life: Callable[[], int]) -> Any:
        for kind, jobs, ended in (
            ("push", self._push_jobs, self.pushes.ended),
            ("fetch", self._fetch_jobs, self.fetches.ended),
        ):
            late = jobs.abandon_late(self._clock()) if kind in kinds else []
            for entry in late:
                del jobs._open[entry.job.number]
                entry.done = [False] * len(entry.done)
                ended(entry)
        return plan(self, new_life)

    with patch.object(StoreTier, "plan", releasing):
        yield
