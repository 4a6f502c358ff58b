"""An engine of the audit over a real Mooncake Store: its master can be killed, frozen, restarted.

The audit compares every byte that a request uses, every output and, in the end, all books. Here
time is real: a master that freezes is frozen for seconds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from moonstep.audit.engine import Engine
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.groupsets import block_bytes
from moonstep.audit.history import Arrive
from moonstep.audit.shape import Shape
from moonstep.bench.mooncake_pool import opened
from moonstep.scheduler.tier import StoreTier
from moonstep.stores.base import Get, Transfer
from moonstep.stores.header import HEADER_BYTES
from tests.store_tier.test_audit import watched

SHAPE = Shape(blocks=24, block_tokens=4, max_tokens=32)
BLOCKS = 4
FAMILIES = 6
HOST_BLOCKS = 2 * BLOCKS
"""Two prompts of six: a prompt that comes again has to come from the store."""
SOON_S = 60.0
RESUMES_S = 15.0
"""Within so long after a master is there again, pushes and hits have to go on."""


class MooncakeStage:
    """One engine, and the prompts it is asked again and again."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine = engine
        self.url = url
        self._runs = 0

    @property
    def tier(self) -> StoreTier:
        tier = self.engine.scheduler.connector.scheduler.tier
        assert isinstance(tier, StoreTier)
        return tier

    def run(self, family: int) -> None:
        """One prompt of four blocks and one token, up to its end."""
        self._runs += 1
        name, tokens = f"r{self._runs}", BLOCKS * self.engine.shape.block_tokens + 1
        self.engine.apply(Arrive(name, family, tokens, tokens))
        while name in self.engine.scheduler.requests:
            self.engine.step()

    def round(self) -> None:
        """Every prompt once; the engine's own cache forgets in between."""
        for family in range(FAMILIES):
            self.run(family)
            assert self.engine.scheduler.reset_prefix_cache()

    def rounds(self, seconds: float) -> int:
        """Load for so long; how many rounds it came to."""
        stop_s, count = time.monotonic() + seconds, 0
        while time.monotonic() < stop_s:
            self.round()
            count += 1
        return count

    def until(self, what: Callable[[], object], within_s: float = SOON_S) -> None:
        """Step the idle engine, as its own loop does while there is work."""
        stop_s = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < stop_s, "it has not come to that in time"
            self.engine.empty_step()
            time.sleep(0.001)

    def until_stored(self) -> None:
        """All prompts are asked until all their objects are in the store.

        What leaves the small host cache before its turn comes is pushed when it is asked again.
        """
        stop_s = time.monotonic() + SOON_S
        while self.tier.pushes.counts.stored < FAMILIES * BLOCKS:
            assert time.monotonic() < stop_s, self.tier.pushes.counts
            self.round()
            self.until(lambda: self.tier.is_idle)

    def resumes(self) -> None:
        """Pushes and hits go on within the time they have for it."""
        pushes, fetches = self.tier.pushes.counts, self.tier.fetches.counts
        stored, fetched = pushes.stored, fetches.fetched_objects
        stop_s = time.monotonic() + RESUMES_S
        family = FAMILIES
        while pushes.stored == stored or fetches.fetched_objects == fetched:
            assert time.monotonic() < stop_s, (stored, pushes, fetched, fetches)
            self.round()
            family += 1
            self.run(family)  # something that the store cannot have yet
            self.engine.empty_step()
        self.until(lambda: not self.tier.quarantined_slots)

    def puts_in_progress(self) -> int:
        """Calls of the workers that have not come back; their headers are made."""
        stores = [rank.connector.worker.jobs._store for rank in self.engine.ranks]
        return sum(store.stats_of("put").in_progress for store in stores)

    def wrong_objects(self) -> tuple[int, int]:
        """Of the objects in the store, how many there are, and how many hold another's bytes.

        Read without any check, so that a header that does not fit cannot hide what happened.
        """
        store = opened(self.url)
        there = wrong = 0
        rank, registry = self.engine.ranks[0], self.engine.clients.registry
        maker = self.tier._keyring.current
        try:
            for name in list(registry._by_hash):
                named = registry.named(name)
                assert named is not None
                stop = named.end_tokens
                states = named.sequence.states(stop - self.engine.shape.block_tokens, stop)
                memory = bytearray(HEADER_BYTES + block_bytes(self.engine.shape))
                item = Transfer(maker.key(0, 0, name), (memoryview(memory),))
                if store.get([item]) == [Get.HIT]:
                    there += 1
                    wrong += not rank.memory.holds(0, states, bytes(memory[HEADER_BYTES:]))
        finally:
            store.close()
        return there, wrong


@contextmanager
def open_mooncake_stage(url: str, shape: Shape = SHAPE, **settings: Any) -> Iterator[MooncakeStage]:
    """The engine; in the end all has to be as at the start, and the shutdown be in time."""
    facts: dict[str, Any] = {
        "host_cache": HOST_BLOCKS * block_bytes(shape),
        "store": url,
        "chunk_tokens": shape.block_tokens,
        "min_fetch_tokens": 1,
        "fetch_share": 1.0,
        "max_busy_share": 1.0,
        "fetch_deadline_s": 0.5,
        "push_deadline_s": 0.5,
        "shutdown_deadline_s": 2.0,
        **settings,
    }
    with watched():
        engine = Engine(shape, ConnectorChoice("MoonstepConnector", facts))
        try:
            engine.empty_step()
            stage = MooncakeStage(engine, url)
            yield stage
            stage.until(lambda: stage.tier.is_idle)  # a client that reconnects takes its time
            engine.drain()
        finally:
            start_s = time.monotonic()
            engine.shutdown()
            taken_s = time.monotonic() - start_s
            engine.threads.close()
        assert taken_s <= 2 * (facts["shutdown_deadline_s"] + 2), f"shutdown took {taken_s:.1f} s"


class Pool:
    """A process of its own that gives a segment to the store and does nothing else."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moonstep.bench.mooncake_pool", self._url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as if its machine were lost."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
