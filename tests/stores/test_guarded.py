"""A guarded store: what trouble costs, who asks, and what is said."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moonstep.stores import guarded as module
from moonstep.stores.base import Get, Put, StoreUnwell
from moonstep.stores.faulty import Fault, FaultyStore
from moonstep.stores.guarded import GuardedStore
from moonstep.stores.health import Backoff, Breaker, Pause, State
from moonstep.stores.memory import MemoryStore
from moonstep.stores.testing import fetch, key, outgoing, payload

WAIT_S = 30.0
SOON = Backoff(first_s=0.01, most_s=0.02)
NEVER = Backoff(first_s=1e6, most_s=1e6)


class Remote(FaultyStore):
    """A store on command that can be probed; it counts probes and calls that reach it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(1 << 20), only=("contains", "put", "get", "remove"))
        self.probes = 0
        self.is_reachable = True
        self.thread: threading.Thread | None = None

    def probe(self) -> None:
        self.probes += 1
        self.thread = threading.current_thread()
        if not self.is_reachable:
            raise StoreUnwell("nobody answers")


def until(holds: Callable[[], bool]) -> None:
    stop = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < stop
        time.sleep(0.002)


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def make(remote: Remote) -> Iterator[Callable[..., GuardedStore]]:
    made: list[GuardedStore] = []

    def make(backoff: Backoff = SOON, pause: Backoff = SOON) -> GuardedStore:
        store = GuardedStore(
            remote, "the store", Breaker(backoff, state=State.OPEN), Pause(pause, lambda: 0.0)
        )
        made.append(store)
        store.wait_well(WAIT_S)
        return store

    yield make
    for store in made:
        store.close()


Make = Callable[..., GuardedStore]


def test_it_is_well_once_a_probe_says_so(make: Make, remote: Remote) -> None:
    store = make()
    assert store.health().state is State.CLOSED
    assert remote.probes == 1
    assert store.put([outgoing(key(1), payload(1))]) == [Put.STORED]
    assert fetch(store, key(1)) == payload(1)


def test_it_opens_without_its_store_and_is_well_when_that_comes(make: Make, remote: Remote) -> None:
    remote.is_reachable = False
    store = make()
    assert str(store.wait_well(WAIT_S)) == "nobody answers"
    with pytest.raises(StoreUnwell, match="nobody answers"):
        store.contains([key(1)])
    remote.is_reachable = True
    until(lambda: store.health().state is State.CLOSED)
    assert store.contains([key(1)]) == [False]


def test_a_dead_store_is_called_once_however_many_ask(make: Make, remote: Remote) -> None:
    """The others are refused at once, and no request pays for asking whether it is back."""
    store = make(backoff=NEVER)
    remote.fault, calls = Fault.UNWELL, []
    remote.contains = lambda keys: calls.append(1) or FaultyStore.contains(remote, keys)  # type: ignore[method-assign,func-returns-value]
    for _ in range(50):
        with pytest.raises(StoreUnwell, match="unwell on command"):
            store.contains([key(1)])
    assert len(calls) == 1
    health = store.health()
    assert (health.state, health.opened, health.refused_calls) == (State.OPEN, 1, 49)
    assert remote.thread is not threading.current_thread()


def test_an_object_that_fails_does_not_make_the_store_unwell(make: Make, remote: Remote) -> None:
    store = make()
    remote.fault = Fault.FAILING
    for _ in range(5):
        assert fetch(store, key(1)) is Get.FAILED
    assert store.health().state is State.CLOSED


def test_a_call_that_hangs_raises_a_doubt_and_others_are_refused_if_nobody_answers(
    make: Make, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DOUBT_S", 0.01)
    store = make()
    remote.fault, remote.is_reachable = Fault.HANGING, False
    caller = threading.Thread(target=store.contains, args=([key(1)],), daemon=True)
    caller.start()
    until(lambda: store.health().state is not State.CLOSED)
    with pytest.raises(StoreUnwell, match="nobody answers"):
        store.contains([key(2)])
    remote.fault, remote.is_reachable = Fault.NONE, True
    remote.resume()
    caller.join(WAIT_S)
    until(lambda: store.health().state is State.CLOSED)


def test_a_slow_call_into_a_store_that_answers_is_no_trouble(
    make: Make, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DOUBT_S", 0.01)
    store = make()
    remote.fault = Fault.HANGING
    caller = threading.Thread(target=store.contains, args=([key(1)],), daemon=True)
    caller.start()
    until(lambda: remote.probes >= 3)
    assert store.health().state is State.CLOSED
    remote.fault = Fault.NONE
    remote.resume()
    caller.join(WAIT_S)
    assert store.health().opened == 0


def test_a_failure_from_before_the_store_came_back_is_no_news(make: Make, remote: Remote) -> None:
    store = make()

    def late_failure() -> None:
        with pytest.raises(StoreUnwell):
            store.contains([key(1)])

    release = threading.Event()

    def fail_late(keys: object) -> list[bool]:
        release.wait(WAIT_S)
        raise StoreUnwell("a call into the store as it was")

    remote.contains = fail_late  # type: ignore[method-assign,assignment]
    caller = threading.Thread(target=late_failure, daemon=True)
    caller.start()
    until(lambda: bool(store._calls))
    remote.fault = Fault.UNWELL
    with pytest.raises(StoreUnwell):
        store.remove([key(1)])
    remote.fault = Fault.NONE
    until(lambda: store.health().state is State.CLOSED)
    release.set()
    caller.join(WAIT_S)
    assert not caller.is_alive()
    assert store.health().opened == 1


def test_puts_to_a_full_store_pause_and_gets_go_on(make: Make, remote: Remote) -> None:
    store = make(pause=NEVER)
    store.put([outgoing(key(1), payload(1))])
    remote.fault, remote.only = Fault.FULL, frozenset({"put"})
    assert store.put([outgoing(key(2), payload(2))]) == [Put.NO_SPACE]
    remote.fault = Fault.NONE
    assert store.put([outgoing(key(3), payload(3)), outgoing(key(4), payload(4))]) == [
        Put.NO_SPACE,
        Put.NO_SPACE,
    ]
    assert store.contains([key(1), key(3)]) == [True, False]
    health = store.health()
    assert (health.is_full, health.paused, health.held_puts) == (True, 1, 2)


def test_puts_go_on_when_one_has_found_room(make: Make, remote: Remote) -> None:
    store = make()
    remote.fault, remote.only = Fault.FULL, frozenset({"put"})
    store.put([outgoing(key(1), payload(1))])
    remote.fault = Fault.NONE
    until(lambda: store.put([outgoing(key(1), payload(1))]) == [Put.STORED])
    assert not store.health().is_full


def test_each_change_is_said_once(
    make: Make, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = make()
    remote.fault, remote.is_reachable = Fault.UNWELL, False
    for _ in range(3):
        with pytest.raises(StoreUnwell) as raised:
            store.contains([key(1)])
        assert raised.value.is_told
    until(lambda: remote.probes >= 4)
    remote.fault, remote.is_reachable = Fault.NONE, True
    until(lambda: store.health().state is State.CLOSED)
    assert [record.getMessage() for record in caplog.records] == [
        "moonstep: the store is connected",
        "moonstep: the store is unwell, requests go on without it: unwell on command",
        "moonstep: the store is well again",
    ]


def test_a_probe_that_breaks_is_a_store_that_is_unwell(make: Make, remote: Remote) -> None:
    def broken() -> None:
        remote.probes += 1
        raise ZeroDivisionError

    remote.probe = broken  # type: ignore[method-assign]
    store = make()
    with pytest.raises(StoreUnwell, match="ZeroDivisionError"):
        store.contains([key(1)])
    until(lambda: remote.probes >= 3)


def test_it_ends_its_thread(make: Make) -> None:
    store = make()
    store.close()
    store._thread.join(WAIT_S)
    assert not store._thread.is_alive()
