"""What stands in the store tier's place where there is no store behind the host cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moonstep.engine import Request, SchedulerOutput
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.misses import NOTHING_FOUND, Look
from moonstep.wire import Job, RankReport


class NoTier:
    """It has nothing, wants nothing and costs nothing."""

    is_idle = True
    owned_slots = 0

    def arrived(self, request: Request) -> None:
        pass

    def is_pending(self, request: Request) -> bool:
        return False

    def admitted(self, request_id: str) -> Look:
        return NOTHING_FOUND

    def finished(self, request: Request) -> None:
        pass

    def captured(self, columns: Columns, requests: Mapping[int, Request]) -> None:
        pass

    def kept(self, request: Request, boundary_tokens: int) -> None:
        pass

    def went_on(self, request: Request, num_computed_tokens: int) -> None:
        pass

    def saw(self, output: SchedulerOutput) -> None:
        pass

    def plan(self, new_life: Callable[[], int]) -> tuple[Job, ...]:
        return ()

    def report(self, by_rank: Mapping[int, RankReport]) -> None:
        pass

    def reset(self) -> None:
        pass

    def has_push_work(self) -> bool:
        return False
