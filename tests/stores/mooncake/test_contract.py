"""The contract, held by a real Mooncake Store: bare, and as Moonstep stacks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonstep.stores.base import Store, StoreUnwell
from moonstep.stores.checked import CheckedStore
from moonstep.stores.measured import MeasuredStore
from moonstep.stores.mooncake import MooncakeStore
from moonstep.stores.testing import StoreContract
from moonstep.stores.urls import open_store
from tests.masters import Master


@pytest.fixture(scope="module")
def opened(master: Master) -> Iterator[list[MooncakeStore]]:
    """The store in use, as the only item; a client takes two seconds to close."""
    stores: list[MooncakeStore] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def mooncake(master: Master, opened: list[MooncakeStore]) -> MooncakeStore:
    """An open, empty store."""
    if opened and is_closed(opened[0]):
        opened.clear()
    if not opened:
        store = open_store(master.url(segment="128MiB"))
        assert isinstance(store, MooncakeStore)
        opened.append(store)
    opened[0].probe()
    opened[0].clear()
    return opened[0]


def is_closed(store: MooncakeStore) -> bool:
    try:
        store.contains([])
    except StoreUnwell:
        return True
    return False


class TestMooncakeStore(StoreContract):
    @pytest.fixture
    def store(self, mooncake: MooncakeStore) -> Store:
        return mooncake


class TestWrappedMooncakeStore(StoreContract):
    @pytest.fixture
    def store(self, mooncake: MooncakeStore) -> Store:
        return CheckedStore(MeasuredStore(mooncake))
