"""A drill: a master that is frozen, killed and restarted again and again under several callers."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from moonstep.stores.base import Get, Put, StoreUnwell
from moonstep.stores.checked import CheckedStore
from moonstep.stores.guarded import GuardedStore
from moonstep.stores.testing import incoming, key, outgoing, payload
from moonstep.stores.urls import open_store
from tests.masters import Master, need_mooncake

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]

ROUNDS = 6
CALLERS = 3
NUMBERS = 40
NBYTES = 100_000
RESUMED_S = 15.0
"""After its master is back, a store is to be used again within so long."""


class Callers:
    """Threads that put and get. Whatever they are told is there has to be what was put."""

    def __init__(self, store: CheckedStore) -> None:
        self._store = store
        self._stop = threading.Event()
        self.hits = self.refusals = 0
        self.wrong: list[int] = []
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CALLERS)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self.threads:
            thread.join(60)

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.wait(0.005):
            number = rng.randrange(NUMBERS)
            try:
                if rng.random() < 0.5:
                    self._store.put([outgoing(key(number), payload(number, NBYTES))])
                else:
                    self._get(number)
            except StoreUnwell:
                with self._lock:
                    self.refusals += 1

    def _get(self, number: int) -> None:
        transfer, memory = incoming(key(number), NBYTES)
        if self._store.get([transfer]) == [Get.HIT]:
            with self._lock:
                self.hits += 1
                if memory != payload(number, NBYTES):
                    self.wrong.append(number)


def wait_until_it_takes_and_gives(store: GuardedStore, number: int) -> float:
    """How long it took until an object could be put and read."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < 60:
        try:
            put = store.put([outgoing(key(number, "after"), b"x" * NBYTES)])
            transfer, _ = incoming(key(number, "after"), NBYTES)
            if put[0] in (Put.STORED, Put.ALREADY_THERE) and store.get([transfer]) == [Get.HIT]:
                return time.monotonic() - start_s
        except StoreUnwell:
            pass
        time.sleep(0.05)
    raise AssertionError("not within a minute")


def test_a_master_in_trouble_again_and_again_costs_hits_and_nothing_else(tmp_path: Path) -> None:
    need_mooncake()
    rng = random.Random(7)
    with Master(tmp_path, {"default_kv_lease_ttl": "1s"}) as master:
        store = open_store(master.url(segment="64MiB"))
        assert isinstance(store, GuardedStore)
        callers = Callers(CheckedStore(store))
        resumed_s = []
        try:
            for number in range(ROUNDS):
                trouble = rng.choice(["freeze", "kill"])
                getattr(master, trouble)()
                time.sleep(rng.uniform(0.5, 12))
                master.thaw() if trouble == "freeze" else master.start()
                resumed_s.append(wait_until_it_takes_and_gives(store, number))
                time.sleep(1)
        finally:
            callers.end()
        assert not any(thread.is_alive() for thread in callers.threads)
        assert not callers.wrong
        assert callers.hits > 100
        assert callers.refusals > 100
        assert max(resumed_s) < RESUMED_S, resumed_s
        store.close()
