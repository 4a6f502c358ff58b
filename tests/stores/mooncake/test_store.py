"""The Mooncake store against real masters, well and unwell."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonstep.config import SettingError
from moonstep.keys import KeyMaker
from moonstep.stores.base import Get, Put, Store, StoreUnwell, Transfer
from moonstep.stores.checked import CheckedStore
from moonstep.stores.guarded import GuardedStore
from moonstep.stores.health import State
from moonstep.stores.mooncake import MooncakeStore, package, process
from moonstep.stores.mooncake.options import MooncakeOptions, SoftPin
from moonstep.stores.mooncake.store import REFUSED_S
from moonstep.stores.testing import fetch, incoming, key, outgoing, payload
from moonstep.stores.urls import Use, open_store
from moonstep.wire import Job, JobEnd, JobKind, StoredObject
from moonstep.worker.arena import Arena
from moonstep.worker.jobs import StoreJobs
from tests.masters import Master, need_mooncake

WAIT_S = 60.0


def until(holds: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    stop = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < stop
        time.sleep(0.02)


def client(master: Master, segment_bytes: int = 64 << 20, **options: Any) -> MooncakeStore:
    store = MooncakeStore(
        MooncakeOptions(master.plan.address, segment_bytes, **options), package.load()
    )
    store.probe()
    return store


@pytest.fixture(scope="module")
def pair(master: Master) -> Iterator[tuple[MooncakeStore, MooncakeStore]]:
    """A client that gives memory and one that gives none."""
    giver, guest = client(master), client(master, 0)
    yield giver, guest
    for store in (guest, giver):
        store.close()


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[Master]:
    """A master that a test may harm."""
    need_mooncake()
    with Master(tmp_path) as running:
        yield running


Pair = tuple[MooncakeStore, MooncakeStore]


def test_what_one_client_puts_another_one_gets(pair: Pair) -> None:
    giver, guest = pair
    giver.clear()
    assert guest.put([outgoing(key(1), payload(1), cuts=(64, 1000))]) == [Put.STORED]
    assert giver.contains([key(1)]) == [True]
    assert fetch(giver, key(1)) == payload(1)


def test_a_damaged_object_is_removed_although_it_was_just_read(pair: Pair) -> None:
    """Whoever reads it has a lease on it; and as long as it is there, no put replaces it."""
    giver, guest = pair
    giver.clear()
    checked = CheckedStore(guest)
    giver.put([outgoing(key(1), payload(1, 5064))])  # no header of ours
    assert fetch(checked, key(1)) is Get.DAMAGED
    assert giver.contains([key(1)]) == [False]
    assert checked.put([outgoing(key(1), payload(1))]) == [Put.STORED]
    assert fetch(checked, key(1)) == payload(1)


def test_what_somebody_reads_is_not_removed_from_under_him(pair: Pair) -> None:
    giver, guest = pair
    giver.clear()
    giver.put([outgoing(key(1), payload(1))])
    assert fetch(guest, key(1)) == payload(1)
    assert giver.remove([key(1)]) == [False]
    assert fetch(guest, key(1)) == payload(1)


def test_a_store_without_any_memory_has_no_space(own_master: Master) -> None:
    store = client(own_master, 0)
    assert store.put([outgoing(key(1), payload(1))]) == [Put.NO_SPACE]
    store.close()


def test_an_object_larger_than_the_pool_has_no_space(pair: Pair) -> None:
    giver, _ = pair
    giver.clear()
    piece = memoryview(bytes(1 << 20))
    assert giver.put([Transfer(key(1), (piece,) * 100)]) == [Put.NO_SPACE]
    assert giver.errors.counts()["put NO_AVAILABLE_HANDLE"] >= 1


def test_all_memory_is_registered_once_and_again_with_a_client_that_comes_later(
    master: Master,
) -> None:
    """Over TCP a transfer works without it, so what counts here is the number."""
    options = MooncakeOptions(master.plan.address)
    store = MooncakeStore(options, package.load())
    first, second = (memoryview(bytearray(4096)) for _ in range(2))
    store.register(first)
    assert store.registrations == 0
    store.probe()
    assert store.registrations == 1
    store.register(second)
    store.probe()
    assert store.registrations == 2
    with pytest.raises(StoreUnwell, match="cannot register 4096 bytes"):
        store.register(second)
    store.close()


def test_a_client_that_cannot_have_the_memory_is_given_up(master: Master) -> None:
    store = MooncakeStore(MooncakeOptions(master.plan.address), package.load())
    memory = memoryview(bytearray(4096))
    store.register(memory)
    store.register(memory)
    with pytest.raises(StoreUnwell, match="cannot register"):
        store.probe()
    with pytest.raises(StoreUnwell, match="no client"):
        store.contains([key(1)])


def test_a_metadata_server_that_is_not_there_is_waited_for(master: Master) -> None:
    """Mooncake's client would wait for it with the GIL held."""
    metadata = f"http://127.0.0.1:{process.free_port()}/metadata"
    store = MooncakeStore(MooncakeOptions(master.plan.address, metadata=metadata), package.load())
    with pytest.raises(StoreUnwell, match="no metadata server answers"):
        store.probe()


def test_a_worker_registers_its_arena_and_each_thread_its_headers(
    pair: Pair, master: Master
) -> None:
    store = client(master, 0)
    arena = Arena(slots=8, slot_bytes=4096, fault_in=False)
    jobs = StoreJobs(arena, CheckedStore(store), 0, [4096], threads=2)
    assert store.registrations == 1
    arena.slot(3)[:] = 7
    put = StoredObject(0, b"name", None, (3,))
    got = StoredObject(0, b"name", None, (5,), generation=9)
    ends: list[JobEnd] = []
    for number, kind, each in ((1, JobKind.PUSH, put), (2, JobKind.FETCH, got)):
        jobs.start([job(number, kind, each)])
        until(lambda: bool(ends.extend(jobs.collect()) or ends))
        assert ends.pop() == JobEnd(number, (True,))
    assert (arena.slot(5) == 7).all()
    assert store.registrations == 3
    jobs.close(WAIT_S)
    arena.close()


def job(number: int, kind: JobKind, each: StoredObject) -> Job:
    return Job(number, kind, "request", KeyMaker("arena", "00ff"), (each,))


class RecordingPackage:
    """Mooncake's module, which also notes how objects are to be replicated."""

    def __init__(self) -> None:
        self._module = package.load()
        self.configs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def ReplicateConfig(self) -> Any:
        self.configs.append(self._module.ReplicateConfig())
        return self.configs[-1]


def test_replicas_a_preferred_segment_and_pinned_heads_reach_mooncake(master: Master) -> None:
    module: Any = RecordingPackage()
    options = MooncakeOptions(
        master.plan.address,
        segment_bytes=64 << 20,
        replicas=2,
        preferred_segment="own",
        soft_pin=SoftPin.HEADS,
    )
    store = MooncakeStore(options, module)
    store.probe()
    store.clear()
    head = outgoing(key(1), payload(1))
    tail = Transfer(key(2), outgoing(key(2), payload(2)).spans, parent=key(1))
    store.put([head, tail])
    rest, pinned = module.configs
    assert {config.replica_num for config in module.configs} == {2}
    assert {config.preferred_segment for config in module.configs} == {segment_of(store)}
    assert pinned.soft_pin_action == module.SoftPinAction.ENABLE
    assert rest.soft_pin_action != module.SoftPinAction.ENABLE
    assert store.contains([key(1), key(2)]) == [True, True]
    store.close()


def segment_of(store: MooncakeStore) -> str:
    assert store._client is not None
    return store._client.segment


def answering(numbers: Sequence[int]) -> Any:
    """A package whose client gives these answers to a put and a get, whatever is asked."""
    handle = SimpleNamespace(
        setup=lambda *_, **__: 0,
        close=lambda: 0,
        get_hostname=lambda: "",
        batch_is_exist=lambda keys: [0] * len(keys),
        batch_get_replica_desc=lambda keys: {},
        batch_get_into_multi_buffers=lambda *_: list(numbers),
        batch_put_from_multi_buffers=lambda *_: list(numbers),
    )

    class Package(SimpleNamespace):
        ReplicateConfig = SimpleNamespace

    return Package(MooncakeDistributedStore=lambda: handle)


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (5000, Get.HIT),
        (0, Get.DAMAGED),
        (4999, Get.DAMAGED),
        (-704, Get.MISS),
        (-707, Get.MISS),
        (-801, Get.DAMAGED),
        (-800, Get.FAILED),
        (-31_000, Get.FAILED),
    ],
)
def test_only_the_exact_number_of_bytes_is_a_hit(master: Master, number: int, answer: Get) -> None:
    store = MooncakeStore(MooncakeOptions(master.plan.address), answering([number]))
    store.probe()
    transfer, _ = incoming(key(1), 5000)
    assert store.get([transfer]) == [answer]


@pytest.mark.parametrize("numbers", [[], [0, 0], [-900], [-901], [-601]])
def test_short_lists_and_lost_masters_are_a_store_that_is_unwell(
    master: Master, numbers: list[int]
) -> None:
    store = MooncakeStore(MooncakeOptions(master.plan.address), answering(numbers))
    store.probe()
    with pytest.raises(StoreUnwell):
        store.put([outgoing(key(1), payload(1))])
    with pytest.raises(StoreUnwell):
        store.get([incoming(key(1), 5000)[0]])


def test_an_object_of_unknown_size_is_left_alone(master: Master) -> None:
    """On a disk, say. To replace it would be to remove it each time it is stored again."""
    module = answering([])
    handle = module.MooncakeDistributedStore()
    on_disk = SimpleNamespace(is_memory_replica=lambda: False, is_disk_replica=lambda: False)
    handle.batch_is_exist = lambda keys: [1] * len(keys)
    handle.batch_get_replica_desc = lambda keys: {each: [on_disk] for each in keys}
    store = MooncakeStore(MooncakeOptions(master.plan.address), module)
    store.probe()
    assert store.put([outgoing(key(1), payload(1))]) == [Put.ALREADY_THERE]


def test_the_end_waits_for_calls_under_way(master: Master) -> None:
    """While a frozen master holds a call, Mooncake's client may not be closed."""
    module, release, events = answering([]), threading.Event(), list[str]()
    handle = module.MooncakeDistributedStore()

    def held_up(keys: Sequence[str]) -> list[int]:
        events.append("called")
        release.wait(WAIT_S)
        events.append("returned")
        return [0] * len(keys)

    handle.batch_is_exist, handle.close = held_up, lambda: events.append("closed")
    store = MooncakeStore(MooncakeOptions(master.plan.address), module)
    store.probe()
    caller = threading.Thread(target=store.contains, args=([key(1)],), daemon=True)
    caller.start()
    until(lambda: events == ["called"])
    closer = threading.Thread(target=store.close, daemon=True)
    closer.start()
    closer.join(0.5)  # an end that does not wait is long over
    assert is_closed(store)
    assert events == ["called"]
    release.set()
    for thread in (caller, closer):
        thread.join(WAIT_S)
    assert events == ["called", "returned", "closed"]


def is_closed(store: MooncakeStore) -> bool:
    try:
        store.remove([])
    except StoreUnwell:
        return True
    return False


def test_a_client_is_closed_while_others_call_it(master: Master) -> None:
    """A call on a client that was closed crashes the process."""
    store = client(master, 0)

    def call_until_it_is_closed() -> None:
        with suppress(StoreUnwell):
            while True:
                store.contains([key(1)])

    callers = [threading.Thread(target=call_until_it_is_closed, daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()
    until(lambda: store._client is not None and store._client._calls > 0)
    store.close()
    for caller in callers:
        caller.join(WAIT_S)
    assert not any(caller.is_alive() for caller in callers)


def test_a_master_that_is_not_there_yet_is_waited_for(own_master: Master) -> None:
    own_master.kill()
    store = open_store(own_master.url())
    with pytest.raises(StoreUnwell, match="no master answers"):
        store.contains([key(1)])
    own_master.start()
    until(lambda: works(store))
    assert fetch(store, key(1)) == payload(1)
    store.close()


def works(store: Store) -> bool:
    """Whether an object can be put now."""
    try:
        return store.put([outgoing(key(1), payload(1))]) in ([Put.STORED], [Put.ALREADY_THERE])
    except StoreUnwell:
        return False


def test_an_operator_is_told_at_once_that_no_master_is_there(own_master: Master) -> None:
    own_master.kill()
    with pytest.raises(StoreUnwell, match="no master answers"):
        open_store(own_master.url(), Use.INSPECT)


def test_a_setting_that_does_not_fit_the_machine_ends_the_start(master: Master) -> None:
    with pytest.raises(SettingError, match="Mooncake does not set up a client"):
        open_store(master.url(segment="64MiB", protocol="rdma", device="no_such_device"))


def test_a_client_that_was_refused_is_not_asked_for_all_the_time(master: Master) -> None:
    """Each try may take Mooncake seconds, in which the whole process stands still."""
    tries, now_s = list[int](), 100.0
    module = answering([])
    handle = module.MooncakeDistributedStore()
    handle.setup = lambda *_, **__: tries.append(1) or -600
    store = MooncakeStore(MooncakeOptions(master.plan.address), module, lambda: now_s)
    for _ in range(3):
        with pytest.raises(StoreUnwell, match="INVALID_PARAMS"):
            store.probe()
    assert len(tries) == 1
    now_s += REFUSED_S
    handle.setup = lambda *_, **__: 0
    store.probe()


def test_after_a_restart_of_the_master_puts_and_gets_go_on(own_master: Master) -> None:
    """It has forgotten everything; the client gives it its memory again by itself."""
    store = open_store(own_master.url(segment="64MiB"))
    assert isinstance(store, GuardedStore)
    assert works(store)
    own_master.kill()
    until(lambda: not works(store))
    assert store.health().state is not State.CLOSED
    own_master.start()
    until(lambda: works(store))
    assert fetch(store, key(1)) == payload(1)
    assert store.health().opened >= 1
    store.close()


def test_a_frozen_master_costs_the_calls_under_way_and_no_others(own_master: Master) -> None:
    store = open_store(own_master.url(segment="64MiB"))
    assert isinstance(store, GuardedStore)
    assert works(store)
    own_master.freeze()
    caller = threading.Thread(target=works, args=(store,), daemon=True)
    caller.start()
    until(lambda: store.health().state is not State.CLOSED)
    with pytest.raises(StoreUnwell, match="no master answers"):
        store.contains([key(1)])
    own_master.thaw()
    caller.join(WAIT_S)
    assert not caller.is_alive()
    until(lambda: works(store))
    store.close()


LEAVES_WITHOUT_ITS_MASTER = """
import sys, threading, time
from moonstep.stores.base import StoreUnwell
from moonstep.stores.urls import open_store
store = open_store(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
def call():
    try:
        store.contains(["a"])
    except StoreUnwell:
        pass
threading.Thread(target=call, daemon=True).start()
if sys.argv[2] == "closing":
    threading.Thread(target=store.close, daemon=True).start()
time.sleep(0.2)
sys.exit(7)
"""


@pytest.mark.parametrize("trouble", ["freeze", "kill"])
@pytest.mark.parametrize("how", ["closing", "leaving"])
def test_a_process_ends_at_once_and_with_its_own_status_whatever_the_master_does(
    own_master: Master, trouble: str, how: str
) -> None:
    """Mooncake's own clean-up waits for a frozen master for half a minute, and then aborts."""
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVES_WITHOUT_ITS_MASTER, own_master.url(segment="64MiB"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"open\n"
        getattr(own_master, trouble)()
        child.stdin.close()
        # Far below the half minute that Mooncake would take, far above what it takes.
        assert child.wait(20) == 7
    finally:
        child.kill()
        child.stdout.close()
        child.wait()
