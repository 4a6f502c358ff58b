"""Checked objects: whatever a store gives, a hit is the very bytes that were put."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonstep.stores import header
from moonstep.stores.base import Get, Put, StoreUnwell, Transfer
from moonstep.stores.checked import BATCH_OBJECTS, CheckedStore
from moonstep.stores.faulty import Fault, FaultyStore
from moonstep.stores.header import HEADER_BYTES, Damage
from moonstep.stores.memory import MemoryStore
from moonstep.stores.testing import fetch, incoming, key, outgoing, payload


class Raw:
    """A checked store, and the memory store below it to tamper with."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.store = CheckedStore(self.inner)

    def stored(self, number: int, nbytes: int = 5000) -> bytes:
        """The object of this number as it lies in the store."""
        found = fetch(self.inner, key(number), HEADER_BYTES + nbytes)
        assert isinstance(found, bytes)
        return found

    def replace(self, number: int, content: bytes) -> None:
        self.inner.remove([key(number)])
        self.inner.put([outgoing(key(number), content)])


@pytest.fixture
def raw() -> Raw:
    raw = Raw()
    raw.store.put([outgoing(key(n), payload(n)) for n in (1, 2)])
    return raw


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


TAMPERINGS: dict[str, tuple[Callable[[Raw], bytes], Damage | None]] = {
    "nothing of ours": (lambda raw: bytes(5064), Damage.NOT_AN_OBJECT),
    "a bit of the magic": (lambda raw: flipped(raw.stored(1), 9), Damage.NOT_AN_OBJECT),
    "a bit of the header": (lambda raw: flipped(raw.stored(1), 8 * 20), Damage.HEADER),
    "a bit of its checksum": (lambda raw: flipped(raw.stored(1), 8 * 63), Damage.HEADER),
    "the payload's first bit": (lambda raw: flipped(raw.stored(1), 8 * 64), Damage.PAYLOAD),
    "the payload's last bit": (lambda raw: flipped(raw.stored(1), 8 * 5064 - 1), Damage.PAYLOAD),
    "another object": (lambda raw: raw.stored(2), Damage.KEY),
    "another payload": (lambda raw: raw.stored(1)[:64] + payload(2), Damage.PAYLOAD),
    "cut short": (lambda raw: raw.stored(1)[:-1], None),
    "too long": (lambda raw: raw.stored(1) + b"x", None),
    "empty": (lambda raw: b"", None),
    "bytes moved by one": (lambda raw: b"x" + raw.stored(1)[:-1], Damage.NOT_AN_OBJECT),
    "header and payload of different lengths": (
        lambda raw: header.seal(key(1), [memoryview(payload(1)[:-1])]) + payload(1),
        Damage.LENGTH,
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_whatever_is_wrong_with_it_is_a_miss_removed_counted_and_logged_once(
    raw: Raw, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tamper, damage = TAMPERINGS[name]
    for times in (1, 2):
        raw.replace(1, tamper(raw))
        assert fetch(raw.store, key(1)) is Get.DAMAGED
        assert fetch(raw.store, key(1)) is Get.MISS
        assert raw.store.damaged.count == times
        assert list(raw.store.damaged.by_reason().values()) == [times]
        assert raw.store.put([outgoing(key(1), payload(1))]) == [Put.STORED]
        assert fetch(raw.store, key(1)) == payload(1)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert key(1) in record.getMessage()
    if damage is not None:
        assert damage.value in record.getMessage()
    assert fetch(raw.store, key(2)) == payload(2)


def test_another_versions_object_is_damaged(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(header, "VERSION", 0)
        old = header.seal(key(1), [memoryview(payload(1))]) + payload(1)
    raw.replace(1, old)
    assert fetch(raw.store, key(1)) is Get.DAMAGED
    assert raw.store.damaged.by_reason() == {Damage.VERSION.value: 1}


@given(bit=st.integers(0, 8 * (HEADER_BYTES + 300) - 1))
def test_no_single_bit_goes_unseen(bit: int) -> None:
    raw = Raw()
    raw.store.put([outgoing(key(1), payload(1, 300))])
    raw.replace(1, flipped(raw.stored(1, 300), bit))
    assert fetch(raw.store, key(1), 300) is Get.DAMAGED


def test_bytes_that_never_arrived_are_no_hit_though_the_memory_was_right_before(raw: Raw) -> None:
    """A store that moves nothing and says it did, over memory with the last object in it."""
    lying = FaultyStore(raw.inner)
    store = CheckedStore(lying)
    transfer, memory = incoming(key(1), 5000)
    assert store.get([transfer]) == [Get.HIT]
    assert memory == payload(1)
    lying.fault = Fault.LYING
    assert store.get([transfer]) == [Get.DAMAGED]


def test_a_memory_that_changed_while_it_was_put_is_never_served(raw: Raw) -> None:
    """The frozen put: the slot holds something else by the time that the store reads it."""
    frozen = FaultyStore(raw.inner, Fault.HANGING, only=("put",))
    store = CheckedStore(frozen)
    slot = bytearray(payload(3))
    answers: list[Put] = []
    thread = threading.Thread(
        target=lambda: answers.extend(store.put([Transfer(key(3), (memoryview(slot),))]))
    )
    thread.start()
    assert frozen.wait_until_hanging(1, timeout_s=10)
    slot[:] = payload(4)
    frozen.resume()
    thread.join(10)
    assert answers == [Put.STORED]
    assert fetch(store, key(3)) is Get.DAMAGED


def test_the_payload_is_checked_where_it_lies_in_pieces(raw: Raw) -> None:
    transfer, memory = incoming(key(1), 5000, cuts=range(1, 5000, 7))
    assert raw.store.get([transfer]) == [Get.HIT]
    assert memory == payload(1)


def test_a_batch_longer_than_the_headers_memory() -> None:
    store = CheckedStore(MemoryStore())
    count = 2 * BATCH_OBJECTS + 7
    assert (
        store.put([outgoing(key(n), payload(n, 8)) for n in range(count)]) == [Put.STORED] * count
    )
    transfers = [incoming(key(n), 8) for n in range(count + 1)]
    answers = store.get([transfer for transfer, _ in transfers])
    assert answers == [Get.HIT] * count + [Get.MISS]
    assert all(memory == payload(n, 8) for n, (_, memory) in enumerate(transfers[:-1]))


def test_fewer_answers_than_objects_make_the_store_unwell(raw: Raw) -> None:
    store = CheckedStore(FaultyStore(raw.inner, Fault.TOO_FEW))
    with pytest.raises(StoreUnwell):
        fetch(store, key(1))
    with pytest.raises(StoreUnwell):
        store.put([outgoing(key(3), payload(3))])


def test_a_damaged_object_that_cannot_be_removed_is_still_no_hit(raw: Raw) -> None:
    raw.replace(1, bytes(5064))
    store = CheckedStore(FaultyStore(raw.inner, Fault.UNWELL, only=("remove",)))
    assert fetch(store, key(1)) is Get.DAMAGED
    assert store.damaged.count == 1


class Registering(MemoryStore):
    """A store that takes bytes only from and to memory that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[memoryview] = []

    def register(self, memory: memoryview) -> None:
        self.regions.append(memory)

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        for item in items:
            for span in item.spans:
                assert any(span.obj is region.obj for region in self.regions)
        return super().put(items)


def test_headers_too_lie_in_memory_that_the_store_was_told_of() -> None:
    inner = Registering()
    store = CheckedStore(inner)
    arena = memoryview(bytearray(8192))
    store.register(arena)
    for _ in range(3):
        store.put([Transfer(key(1), (arena[:100],))])
    assert len(inner.regions) == 2
    thread = threading.Thread(target=lambda: store.put([Transfer(key(2), (arena[:100],))]))
    thread.start()
    thread.join(10)
    assert len(inner.regions) == 3
