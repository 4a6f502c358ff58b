"""The contract, held by a real Mooncake Store: bare, and as Moonstep stacks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonstep.stores.base import Store, StoreUnwell
from moonstep.stores.checked import CheckedStore
from moonstep.stores.guarded import GuardedStore
from moonstep.stores.measured import MeasuredStore
from moonstep.stores.mooncake import MooncakeStore, package
from moonstep.stores.mooncake.options import MooncakeOptions
from moonstep.stores.testing import StoreContract
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
        options = MooncakeOptions(master.plan.address, segment_bytes=128 << 20)
        opened.append(MooncakeStore(options, package.load()))
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


class TestStackedMooncakeStore(StoreContract):
    """As a worker stacks it."""

    @pytest.fixture
    def store(self, mooncake: MooncakeStore) -> Iterator[Store]:
        guarded = GuardedStore(mooncake, "the store under test")
        assert guarded.wait_well(20) is None
        yield CheckedStore(MeasuredStore(guarded))
        guarded.stop_asking()
