"""The store that fails on command does what it says, and stops when told to."""

from __future__ import annotations

import threading

import pytest

from moonstep.stores.base import Get, Put, Store, StoreUnwell
from moonstep.stores.checked import CheckedStore
from moonstep.stores.faulty import Fault, FaultyStore
from moonstep.stores.measured import LATENCY_BOUNDS_S, MeasuredStore
from moonstep.stores.memory import MemoryStore
from moonstep.stores.testing import fetch, incoming, key, outgoing, payload


@pytest.fixture
def faulty() -> FaultyStore:
    store = FaultyStore(MemoryStore())
    store.put([outgoing(key(1), payload(1))])
    return store


def put(store: Store, number: int) -> Put:
    (answer,) = store.put([outgoing(key(number), payload(number))])
    return answer


NO_HIT = sorted(
    set(Fault) - {Fault.NONE, Fault.LATE, Fault.FULL, Fault.HANGING, Fault.UNWELL, Fault.BROKEN},
    key=lambda fault: fault.name,
)


@pytest.mark.parametrize("fault", NO_HIT)
def test_under_a_check_no_fault_gives_a_wrong_byte(fault: Fault) -> None:
    faulty = FaultyStore(MemoryStore())
    store = CheckedStore(faulty)
    put(store, 1)
    faulty.fault = fault
    if fault is Fault.TOO_FEW:
        with pytest.raises(StoreUnwell):
            fetch(store, key(1))
    else:
        assert fetch(store, key(1)) in {Get.MISS, Get.DAMAGED, Get.FAILED}


@pytest.mark.parametrize("fault", [*NO_HIT, Fault.FULL])
def test_what_is_put_under_a_fault_is_never_served_wrong_afterwards(fault: Fault) -> None:
    faulty = FaultyStore(MemoryStore(), fault)
    store = CheckedStore(faulty)
    if fault is Fault.TOO_FEW:
        with pytest.raises(StoreUnwell):
            put(store, 1)
    else:
        put(store, 1)
    faulty.fault = Fault.NONE
    assert fetch(store, key(1)) in {payload(1), Get.MISS, Get.DAMAGED}


def test_without_a_fault_it_is_the_store_itself(faulty: FaultyStore) -> None:
    faulty.fault = Fault.MISSING
    assert fetch(faulty, key(1)) is Get.MISS
    faulty.fault = Fault.NONE
    assert fetch(faulty, key(1)) == payload(1)


def test_a_vanishing_object_is_found_and_then_gone(faulty: FaultyStore) -> None:
    faulty.fault = Fault.VANISHING
    assert faulty.contains([key(1), key(2)]) == [True, False]
    assert fetch(faulty, key(1)) is Get.MISS


def test_a_short_read_leaves_half_of_the_memory_as_it_was(faulty: FaultyStore) -> None:
    faulty.fault = Fault.SHORT
    transfer, memory = incoming(key(1), 5000, cuts=(1000, 4000))
    memory[:] = b"\xee" * 5000
    assert faulty.get([transfer]) == [Get.HIT]
    assert memory == payload(1)[:2500] + b"\xee" * 2500


def test_a_flipping_store_flips_one_bit(faulty: FaultyStore) -> None:
    faulty.fault = Fault.FLIPPING
    got = fetch(faulty, key(1))
    assert isinstance(got, bytes)
    difference = int.from_bytes(got) ^ int.from_bytes(payload(1))
    assert difference.bit_count() == 1


def test_faults_can_be_confined_to_verbs(faulty: FaultyStore) -> None:
    faulty.fault, faulty.only = Fault.UNWELL, frozenset({"put"})
    assert fetch(faulty, key(1)) == payload(1)
    with pytest.raises(StoreUnwell):
        put(faulty, 2)
    faulty.fault = Fault.BROKEN
    with pytest.raises(ZeroDivisionError):
        put(faulty, 2)


def test_a_hanging_call_comes_back_when_resumed_and_then_does_its_work(faulty: FaultyStore) -> None:
    faulty.fault = Fault.HANGING
    transfer, memory = incoming(key(1), 5000)
    answers: list[Get] = []
    thread = threading.Thread(target=lambda: answers.extend(faulty.get([transfer])))
    thread.start()
    assert faulty.wait_until_hanging(1, timeout_s=10)
    assert memory == bytes(5000)
    faulty.fault = Fault.NONE
    assert fetch(faulty, key(1)) == payload(1)  # later calls go through
    assert faulty.hanging == 1
    faulty.resume()
    thread.join(10)
    assert answers == [Get.HIT]
    assert memory == payload(1)
    assert faulty.hanging == 0


def test_resuming_lets_only_those_go_that_hang_now(faulty: FaultyStore) -> None:
    faulty.resume()
    faulty.fault = Fault.HANGING
    threads = [threading.Thread(target=put, args=(faulty, n)) for n in (2, 3)]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        assert faulty.wait_until_hanging(number, timeout_s=10)
    faulty.resume()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert faulty.hanging == 0


class TestMeasured:
    def test_calls_objects_bytes_times_and_outcomes_are_counted(self) -> None:
        now_ns = 0

        def clock_ns() -> int:
            nonlocal now_ns
            now_ns += 1_000_000
            return now_ns

        store = MeasuredStore(MemoryStore(), clock_ns)
        put(store, 1)
        store.put([outgoing(key(n), payload(n)) for n in (1, 2)])
        fetch(store, key(1))
        fetch(store, key(3))
        store.contains([key(1), key(3)])
        stats = store.stats()
        assert stats["put"].outcomes == {"stored": 2, "already there": 1}
        assert (stats["put"].calls, stats["put"].objects, stats["put"].nbytes) == (2, 3, 10_000)
        assert stats["put"].ns == 2_000_000
        assert stats["put"].latencies == [0, 2, *[0] * (len(LATENCY_BOUNDS_S) - 1)]
        assert stats["get"].outcomes == {"hit": 1, "miss": 1}
        assert stats["get"].nbytes == 5000
        assert stats["contains"].outcomes == {"True": 1, "False": 1}
        assert stats["remove"].calls == 0

    def test_a_call_that_hangs_or_fails_shows(self) -> None:
        faulty = FaultyStore(MemoryStore(), Fault.HANGING)
        store = MeasuredStore(faulty)
        thread = threading.Thread(target=put, args=(store, 1))
        thread.start()
        assert faulty.wait_until_hanging(1, timeout_s=10)
        assert store.stats()["put"].in_progress == 1
        faulty.resume()
        thread.join(10)
        faulty.fault = Fault.UNWELL
        with pytest.raises(StoreUnwell):
            put(store, 2)
        stats = store.stats()["put"]
        assert (stats.in_progress, stats.calls, stats.unwell) == (0, 2, 1)

    def test_a_snapshot_does_not_move(self) -> None:
        store = MeasuredStore(MemoryStore())
        before = store.stats()
        put(store, 1)
        assert before["put"].calls == 0
        assert before["put"].outcomes == {}
