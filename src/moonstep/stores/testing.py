"""What every store has to hold to, as tests: a backend's test class inherits ``StoreContract``.

.. code-block:: python

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Iterator[Store]:
            store = MyStore(capacity_bytes=ROOM_BYTES)
            yield store
            store.close()
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import pytest

from moonstep.stores.base import Get, Inspectable, Key, Put, Store, StoreUnwell, Transfer

ROOM_BYTES: Final = 64 << 20
"""The store under test has at least so much room, and is empty."""

_THREADS: Final = 6
_ROUNDS: Final = 15


def key(number: int, namespace: str = "contract") -> Key:
    """A key of the form that Moonstep makes."""
    return Key(f"{namespace}/0123456789abcdef/0.0/{number:064x}")


def payload(number: int, nbytes: int = 5000) -> bytes:
    """Bytes that differ from those of every other number."""
    return random.Random(number).randbytes(nbytes)


def outgoing(key: Key, payload: bytes, cuts: Sequence[int] = ()) -> Transfer:
    """A transfer of these bytes, cut into pieces at ``cuts``."""
    edges = [0, *cuts, len(payload)]
    pieces = [payload[start:stop] for start, stop in pairwise(edges)]
    return Transfer(key, tuple(map(memoryview, pieces)))


def incoming(key: Key, nbytes: int, cuts: Sequence[int] = ()) -> tuple[Transfer, bytearray]:
    """A transfer into fresh memory cut at ``cuts``, and that memory."""
    memory = bytearray(nbytes)
    edges = [0, *cuts, nbytes]
    view = memoryview(memory)
    pieces = tuple(view[start:stop] for start, stop in pairwise(edges))
    return Transfer(key, pieces), memory


def fetch(store: Store, key: Key, nbytes: int = 5000) -> bytes | Get:
    """The object's bytes, or the answer that is not ``HIT``."""
    transfer, memory = incoming(key, nbytes)
    (answer,) = store.get([transfer])
    return bytes(memory) if answer is Get.HIT else answer


class StoreContract:
    """What Moonstep relies on. A subclass gives the fixture ``store``: an open, empty store."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("a test class gives its own store")

    def test_an_object_comes_back_bit_for_bit(self, store: Store) -> None:
        assert store.put([outgoing(key(1), payload(1))]) == [Put.STORED]
        assert fetch(store, key(1)) == payload(1)

    def test_an_object_may_lie_in_pieces_that_differ_between_put_and_get(
        self, store: Store
    ) -> None:
        store.put([outgoing(key(1), payload(1), cuts=(1, 1, 4097))])
        transfer, memory = incoming(key(1), 5000, cuts=(2500,))
        assert store.get([transfer]) == [Get.HIT]
        assert memory == payload(1)

    def test_an_object_may_lie_in_thousands_of_pieces(self, store: Store) -> None:
        store.put([outgoing(key(1), payload(1), cuts=range(1, 5000))])
        transfer, memory = incoming(key(1), 5000, cuts=range(2, 5000, 2))
        assert store.get([transfer]) == [Get.HIT]
        assert memory == payload(1)

    def test_a_large_object_comes_back(self, store: Store) -> None:
        nbytes = 9 << 20
        assert store.put([outgoing(key(1), payload(1, nbytes), cuts=(1 << 20,))]) == [Put.STORED]
        assert fetch(store, key(1), nbytes) == payload(1, nbytes)

    def test_a_batch_may_be_empty(self, store: Store) -> None:
        assert store.contains([]) == []
        assert store.put([]) == []
        assert store.get([]) == []
        assert store.remove([]) == []

    def test_answers_come_in_the_order_asked(self, store: Store) -> None:
        stored = [number for number in range(20) if number % 3]
        store.put([outgoing(key(number), payload(number)) for number in stored])
        asked = random.Random(7).sample(range(20), 20)
        assert store.contains([key(number) for number in asked]) == [n % 3 > 0 for n in asked]
        transfers = [incoming(key(number), 5000) for number in asked]
        answers = store.get([transfer for transfer, _ in transfers])
        assert answers == [Get.HIT if number % 3 else Get.MISS for number in asked]
        for number, (_, memory) in zip(asked, transfers, strict=True):
            assert number % 3 == 0 or memory == payload(number)

    def test_a_batch_may_name_an_object_more_than_once(self, store: Store) -> None:
        put = store.put([outgoing(key(n), payload(n)) for n in (1, 2, 1)])
        assert put == [Put.STORED, Put.STORED, Put.ALREADY_THERE]
        transfers = [incoming(key(n), 5000) for n in (1, 1, 2, 1)]
        assert store.get([transfer for transfer, _ in transfers]) == [Get.HIT] * 4
        assert [memory for _, memory in transfers] == [payload(n) for n in (1, 1, 2, 1)]
        assert store.contains([key(1), key(1)]) == [True, True]

    def test_what_was_never_put_is_missing(self, store: Store) -> None:
        assert store.contains([key(1)]) == [False]
        assert fetch(store, key(1)) is Get.MISS
        assert store.remove([key(1)]) == [False]

    @pytest.mark.parametrize("nbytes", [1, 4999, 5001, 10_000])
    def test_an_object_of_another_size_is_no_hit(self, store: Store, nbytes: int) -> None:
        store.put([outgoing(key(1), payload(1))])
        assert fetch(store, key(1), nbytes) is Get.DAMAGED

    def test_a_second_put_finds_it_already_there(self, store: Store) -> None:
        store.put([outgoing(key(1), payload(1))])
        assert store.put([outgoing(key(1), payload(1))]) == [Put.ALREADY_THERE]
        assert fetch(store, key(1)) == payload(1)

    def test_a_put_of_another_size_replaces(self, store: Store) -> None:
        store.put([outgoing(key(1), payload(1))])
        assert store.put([outgoing(key(1), payload(2, 6000))]) == [Put.STORED]
        assert fetch(store, key(1), 6000) == payload(2, 6000)

    def test_what_is_removed_is_gone_and_can_be_put_again(self, store: Store) -> None:
        store.put([outgoing(key(number), payload(number)) for number in (1, 2)])
        assert store.remove([key(3), key(1)]) == [False, True]
        assert store.contains([key(1), key(2)]) == [False, True]
        assert fetch(store, key(1)) is Get.MISS
        assert store.put([outgoing(key(1), payload(4))]) == [Put.STORED]
        assert fetch(store, key(1)) == payload(4)

    def test_the_memory_belongs_to_the_caller_again(self, store: Store) -> None:
        memory = bytearray(payload(1))
        view = memoryview(memory)
        store.put([Transfer(key(1), (view,))])
        store.get([Transfer(key(1), (view,))])
        memory[:] = bytes(5000)
        assert fetch(store, key(1)) == payload(1)
        view.release()
        memory.clear()  # a BufferError, if the store has kept a view of it

    def test_threads_may_call_at_once(self, store: Store) -> None:
        def work(thread: int) -> None:
            rng = random.Random(thread)
            for _ in range(_ROUNDS):
                numbers = rng.sample(range(8), 4)
                put = store.put([outgoing(key(n), payload(n)) for n in numbers])
                assert set(put) <= {Put.STORED, Put.ALREADY_THERE}
                for number in numbers:
                    assert fetch(store, key(number)) in (payload(number), Get.MISS)
                store.remove([key(rng.randrange(8))])

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(_THREADS)))

    def test_a_closed_store_is_unwell(self, store: Store) -> None:
        store.close()
        store.close()
        with pytest.raises(StoreUnwell):
            store.contains([key(1)])
        with pytest.raises(StoreUnwell):
            store.put([outgoing(key(1), payload(1))])
        with pytest.raises(StoreUnwell):
            fetch(store, key(1))
        with pytest.raises(StoreUnwell):
            store.remove([key(1)])

    def test_objects_are_listed_by_namespace(self, store: Store) -> None:
        inspectable = _inspectable(store)
        names = [("a", 1), ("ab", 2), ("a", 3)]
        store.put([outgoing(key(n, space), payload(n, 100 * n)) for space, n in names])
        listed = {entry.key: entry.nbytes for entry in inspectable.entries("a")}
        assert listed == {key(1, "a"): 100, key(3, "a"): 300}
        assert len(list(inspectable.entries())) == 3
        assert list(inspectable.entries("b")) == []

    def test_usage_counts_what_is_there(self, store: Store) -> None:
        inspectable = _inspectable(store)
        assert inspectable.usage().objects == 0
        store.put([outgoing(key(number), payload(number)) for number in (1, 2)])
        usage = inspectable.usage()
        assert usage.objects == 2
        assert usage.used_bytes >= 10_000
        assert usage.capacity_bytes is None or usage.capacity_bytes >= usage.used_bytes

    def test_a_peek_reads_as_a_get_does(self, store: Store) -> None:
        inspectable = _inspectable(store)
        store.put([outgoing(key(1), payload(1))])
        (there, memory), (missing, _) = incoming(key(1), 5000), incoming(key(2), 5000)
        assert inspectable.peek([missing, there]) == [Get.MISS, Get.HIT]
        assert memory == payload(1)


def _inspectable(store: Store) -> Inspectable:
    if not isinstance(store, Inspectable):
        pytest.skip("this store cannot list its objects")
    return store
