"""The example backend of ``docs/stores.md`` is what it says: short, and a store."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonstep.config import SettingError
from moonstep.stores.base import Store
from moonstep.stores.checked import CheckedStore
from moonstep.stores.testing import StoreContract, fetch, key, outgoing, payload
from moonstep.stores.urls import ENTRY_POINT_GROUP, StoreUrl

PAGE = (Path(__file__).parent.parent.parent / "docs" / "stores.md").read_text(encoding="utf-8")
EXAMPLE, ITS_TEST = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
REGISTRATION = re.search(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

names: dict[str, Any] = {"__name__": "example"}
exec(compile(EXAMPLE, "docs/stores.md", "exec"), names)
exec(compile(ITS_TEST, "docs/stores.md", "exec"), names)


class TestTheExample(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = names["SqliteStore"](str(tmp_path / "objects.db"))
        yield store
        store.close()


def test_it_is_under_100_lines() -> None:
    assert len(EXAMPLE.splitlines()) < 100


def test_its_own_test_class_inherits_the_contract() -> None:
    assert issubclass(names["TestSqliteStore"], StoreContract)


def test_its_registration_names_the_entry_point_group() -> None:
    assert REGISTRATION is not None
    points = tomllib.loads(REGISTRATION[1])["project"]["entry-points"]
    assert points[ENTRY_POINT_GROUP]["sqlite"].endswith(":backend")


def test_it_opens_by_url_and_serves_under_the_checks(tmp_path: Path) -> None:
    store = CheckedStore(names["backend"](StoreUrl.parse(f"sqlite://{tmp_path}/objects.db"))())
    store.put([outgoing(key(1), payload(1))])
    assert fetch(store, key(1)) == payload(1)
    store.close()
    with pytest.raises(SettingError):
        names["backend"](StoreUrl.parse(f"sqlite://{tmp_path}/objects.db?capacity=1GiB"))
