"""Moonstep in the real scheduler of the installed vLLM, with real workers and no model.

The engine is the audit's: it runs the real ``Scheduler``, real worker halves over real memory, and
compares every byte a request reads, and every byte that is kept, with an oracle. On top of that,
after every ``schedule()`` each life's tables have to be the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moonstep.audit import quiet
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive, Event
from moonstep.audit.shape import Shape
from moonstep.groups import GroupKind
from moonstep.scheduler.scheduler import MooncakeStoreScheduler
from moonstep.worker.worker import MooncakeStoreWorker

CONNECTOR = "moonstep.engines.vllm.connector:MoonstepConnector"


class Watched:
    """An engine whose every step is noted and whose tables are compared with ours."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: list[Any] = []
        self.life_of: dict[int, str] = {}
        self._schedule = engine.scheduler.schedule
        engine.scheduler.schedule = self._watched_schedule

    @property
    def half(self) -> MooncakeStoreScheduler:
        half: MooncakeStoreScheduler = self.engine.scheduler.connector.scheduler
        return half

    @property
    def workers(self) -> list[MooncakeStoreWorker]:
        return [rank.connector.worker for rank in self.engine.ranks]

    @property
    def last(self) -> Any:
        """What the scheduler put out last."""
        return self.outputs[-1]

    def apply(self, *events: Event) -> None:
        for event in events:
            self.engine.apply(event)

    def settle(self) -> None:
        """Run until nothing is left, and on until every report is in."""
        while self.engine.step():
            pass
        self.engine.empty_step()
        self.engine.empty_step()

    def run(self, **arrival: Any) -> int:
        """Run one request to its end; the tokens it was promised by the host cache."""
        before = self.engine.seam.counts.loaded_tokens
        self.apply(Arrive(**arrival))
        self.settle()
        return self.engine.seam.counts.loaded_tokens - before

    def received(self, name: str) -> int:
        """How many tokens the client of a request has received."""
        return self.engine.clients.by_id[name].received

    def _watched_schedule(self, *args: Any, **keywords: Any) -> Any:
        output = self._schedule(*args, **keywords)
        self.outputs.append(output)
        scheduler = self.engine.scheduler
        running = set(output.num_scheduled_tokens)
        assert running <= set(self.half.lives), "a scheduled request without a life"
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            assert request_id in running or request_id not in self.half.lives
        for request_id, tracker in self.half.lives.items():
            assert self.life_of.setdefault(tracker.life, request_id) == request_id
            table = scheduler.kv_cache_manager.get_block_ids(request_id)
            for group in self.half._groups:
                ours, theirs = tracker.tables.by_group[group.index], list(table[group.index])
                if group.kind is GroupKind.RECURRENT_STATE:
                    continue  # the engine moves its blocks about, and nobody reads ours
                if group.kind is GroupKind.SLIDING_WINDOW:
                    assert len(ours) == len(theirs), request_id
                    # What left the window is 0 in the engine's.
                    ours = [a if b else 0 for a, b in zip(ours, theirs, strict=True)]
                assert ours == theirs, (request_id, group.index)
        return output


@contextmanager
def open_engine(
    shape: Shape, *, slots: int = 400, first_step: bool = True, **settings: Any
) -> Iterator[Watched]:
    """An engine with a host cache of ``slots`` blocks; drained, checked and shut down after."""
    quiet.hush()
    extra = {"host_cache": slots * block_bytes(shape), "capture": "eager", **settings}
    engine = Engine(shape, ConnectorChoice(CONNECTOR, extra))
    try:
        watched = Watched(engine)
        if first_step:
            engine.empty_step()  # the ranks tell how many slots they have
        yield watched
        engine.drain()
        assert watched.half.is_idle
        assert watched.half.lives == {}
        engine.shutdown()
    finally:
        engine.threads.close()
