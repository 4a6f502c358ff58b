"""Store URLs: strict, in one line, and open to third parties."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from moonstep.config import SettingError
from moonstep.stores import memory, urls
from moonstep.stores.base import Store
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.memory import MemoryStore
from moonstep.stores.testing import fetch, key, outgoing, payload
from moonstep.stores.urls import Opener, StoreUrl, Use, open_store, resolve

REFUSED = {
    "": "write a URL",
    "/var/cache": "write a URL",
    "dir:/var/cache": "write a URL",
    "dri:///var/cache?capacity=1GiB": "did you mean 'dir'?",
    "xyz://a": "there are: dir, memory",
    "dir:///var/cache": "?capacity=200GiB",
    "dir:///?capacity=1GiB": "absolute",
    "dir://var/cache?capacity=1GiB": "absolute",
    "dir:///var/cache?capacty=1GiB": "did you mean 'capacity'?",
    "dir:///var/cache?capacity=1GiB&capacity=2GiB": "needs one value",
    "dir:///var/cache?capacity=": "needs one value",
    "dir:///var/cache?capacity=lots": "write a size",
    "dir:///var/cache?capacity=0": "keeps nothing",
    "dir:///var/cache?capacity=1GiB#x": "%23",
    "memory://name/path": "no path",
    "memory://?size=1": "there are: capacity",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line_that_says_why(text: str) -> None:
    with pytest.raises(SettingError) as refusal:
        resolve(text)
    message = str(refusal.value)
    assert message.startswith("moonstep: store")
    assert "\n" not in message
    assert REFUSED[text] in message


def test_a_value_that_is_no_text_is_refused() -> None:
    with pytest.raises(SettingError):
        StoreUrl.parse(7)  # type: ignore[arg-type]


def test_resolving_touches_nothing(tmp_path: Path) -> None:
    resolve(f"dir://{tmp_path}/new?capacity=1GiB")
    assert not (tmp_path / "new").exists()


def test_a_directory_opens_by_its_url(tmp_path: Path) -> None:
    store = open_store(f"dir://{tmp_path}/with%20space?capacity=1MiB")
    assert isinstance(store, DirectoryStore)
    assert (tmp_path / "with space").is_dir()
    assert store.usage().capacity_bytes == 1 << 20
    store.close()


def test_a_directory_can_be_inspected_without_a_capacity(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no store in this folder"):
        open_store(f"dir://{tmp_path}/new", Use.INSPECT)
    open_store(f"dir://{tmp_path}/new?capacity=1MiB").close()
    open_store(f"dir://{tmp_path}/new", Use.INSPECT).close()


def test_memory_stores_of_one_name_are_one_store() -> None:
    one, other, nameless = map(open_store, ("memory://urls", "memory://urls", "memory://"))
    one.put([outgoing(key(1), payload(1))])
    assert fetch(other, key(1)) == payload(1)
    one.close()
    assert fetch(other, key(1)) == payload(1)
    assert nameless.contains([key(1)]) == [False]
    memory.forget("urls")
    assert open_store("memory://urls").contains([key(1)]) == [False]
    memory.forget("urls")


def third_party(url: StoreUrl) -> Opener:
    url.check_params(("rooms",))
    return MemoryStore


class TestThirdParties:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points = [
            EntryPoint("third", f"{__name__}:third_party", urls.ENTRY_POINT_GROUP),
            EntryPoint("broken", "no.such.module:backend", urls.ENTRY_POINT_GROUP),
        ]

        def entry_points(*, group: str) -> list[EntryPoint]:
            return [point for point in points if point.group == group]

        monkeypatch.setattr(urls, "entry_points", entry_points)

    def test_their_scheme_opens_their_store(self) -> None:
        store: Store = open_store("third://host/path?rooms=2")
        assert isinstance(store, MemoryStore)

    def test_their_parameters_are_checked_as_strictly(self) -> None:
        with pytest.raises(SettingError, match="did you mean 'rooms'"):
            resolve("third://host?room=2")

    def test_their_schemes_are_suggested(self) -> None:
        with pytest.raises(SettingError, match="did you mean 'third'"):
            resolve("thrid://host")

    def test_one_that_does_not_load_says_why(self) -> None:
        with pytest.raises(SettingError, match=r"no\.such\.module") as refusal:
            resolve("broken://host")
        assert "\n" not in str(refusal.value)


def test_stores_and_keys_import_neither_torch_nor_vllm_nor_pytest() -> None:
    code = (
        "import sys, moonstep.stores, moonstep.keys, moonstep.stores.directory, "
        "moonstep.stores.faulty, moonstep.stores.measured, moonstep.stores.memory;"
        "assert not {'torch', 'vllm', 'numba', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
