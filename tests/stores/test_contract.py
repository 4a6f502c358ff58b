"""The contract, held by every store that ships and by every wrapper around one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonstep.stores.base import Store
from moonstep.stores.checked import CheckedInspection, CheckedStore
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.faulty import FaultyStore
from moonstep.stores.measured import MeasuredStore
from moonstep.stores.memory import MemoryStore
from moonstep.stores.testing import ROOM_BYTES, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(ROOM_BYTES)


class TestDirectoryStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = DirectoryStore(tmp_path / "store", ROOM_BYTES)
        yield store
        store.close()


class TestCheckedDirectoryStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = CheckedInspection(DirectoryStore(tmp_path / "store", ROOM_BYTES))
        yield store
        store.close()


class TestWrappedMemoryStore(StoreContract):
    """All wrappers at once, as an audit stacks them."""

    @pytest.fixture
    def store(self) -> Store:
        return CheckedStore(MeasuredStore(FaultyStore(MemoryStore(ROOM_BYTES))))
