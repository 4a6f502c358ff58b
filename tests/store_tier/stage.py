"""An engine with a small host cache and a store that freezes when told to, block by block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moonstep.audit.connectors.moonstep import SHELF, FaultyStores
from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice, block_bytes
from moonstep.audit.history import Arrive
from moonstep.audit.shape import Shape
from moonstep.scheduler.tier import StoreTier
from moonstep.stores import memory
from moonstep.stores.header import HEADER_BYTES

SHAPE = Shape(blocks=24, block_tokens=4, max_tokens=32)
BLOCKS = 4
PROMPT_TOKENS = BLOCKS * SHAPE.block_tokens
SOON_S = 20.0


class Stage:
    """An engine with a host cache of few slots and a store behind it."""

    def __init__(self, engine: Engine, stores: FaultyStores) -> None:
        self.engine = engine
        self.stores = stores

    @property
    def tier(self) -> StoreTier:
        tier = self.engine.scheduler.connector.scheduler.tier
        assert isinstance(tier, StoreTier)
        return tier

    def run(self, name: str, family: int) -> None:
        """One prompt of four blocks and one token, up to its end."""
        self.engine.apply(Arrive(name, family, PROMPT_TOKENS + 1, PROMPT_TOKENS + 1))
        while name in self.engine.scheduler.requests:
            self.engine.step()
        self.steps(3)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.empty_step()

    def until(self, what: Any) -> None:
        stop_s = time.monotonic() + SOON_S
        while not what():
            assert time.monotonic() < stop_s
            self.steps(1)

    def wait_until_hanging(self) -> None:
        self.until(lambda: any(store.hanging for store in self.stores.opened))

    def wait_until_abandoned(self) -> None:
        """With quarantine slots stay owned; without it, jobs are no longer known of."""
        self.until(lambda: not (self.tier._push_jobs.awaited or self.tier._fetch_jobs.awaited))

    def resume(self) -> None:
        self.stores.clear()
        self.until(lambda: not any(store.hanging for store in self.stores.opened))
        workers = [rank.connector.worker for rank in self.engine.ranks]
        self.until(lambda: not any(worker.jobs._open for worker in workers))
        self.steps(3)

    def forget_locally(self) -> None:
        """Engine and host cache are full of other things."""
        for family in range(90, 93):
            self.run(f"other{family}", family)
        assert self.engine.scheduler.reset_prefix_cache()

    def wrong_objects(self) -> int:
        """Objects whose bytes are not those of their key, whatever their header says."""
        wrong = 0
        shelf, rank = memory._shelves[SHELF], self.engine.ranks[0]
        for entry in shelf.entries():
            stored = shelf.read(entry.key, touch=False)
            assert stored is not None
            name = bytes.fromhex(entry.key.rpartition("/")[2])
            states = self.engine.clients.registry.states(name, SHAPE.block_tokens)
            assert states is not None
            wrong += rank.memory.block_bytes(0, states) != stored[HEADER_BYTES:]
        return wrong


@contextmanager
def open_stage(
    stores: FaultyStores,
    slots: int,
    *,
    first_step: bool = True,
    shape: Shape = SHAPE,
    **settings: Any,
) -> Iterator[Stage]:
    """The engine; in the end all has to be as at the start."""
    facts: dict[str, Any] = {
        "host_cache": slots * block_bytes(shape),
        "capture": "eager",
        "store": f"memory://{SHELF}",
        "chunk_tokens": SHAPE.block_tokens,
        "min_fetch_tokens": 1,
        "fetch_share": 1.0,
        "max_busy_share": 1.0,
        "push_deadline_s": SOON_S,
        "fetch_deadline_s": SOON_S,
        **settings,
    }
    engine = Engine(shape, ConnectorChoice("MoonstepConnector", facts))
    try:
        if first_step:
            engine.empty_step()  # the ranks tell how many slots they have
        yield Stage(engine, stores)
        engine.drain()
    finally:
        stores.clear()
        engine.shutdown()
        engine.threads.close()
