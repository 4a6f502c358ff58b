"""``moonstep store`` on a real directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonstep.cli.store import app
from moonstep.stores.checked import CheckedStore
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.testing import fetch, key, outgoing, payload

COLUMNS = {"COLUMNS": "200"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of 30 objects in namespace ``a`` and 10 in ``b``."""
    store = CheckedStore(DirectoryStore(tmp_path / "store", 64 << 20))
    store.put([outgoing(key(n, "a"), payload(n)) for n in range(30)])
    store.put([outgoing(key(n, "b"), payload(n)) for n in range(10)])
    store.close()
    return tmp_path / "store"


def run(*args: str, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, args, input=answer, env=COLUMNS)
    return result.exit_code, result.output


def test_stat_shows_namespaces_and_the_sum(root: Path) -> None:
    status, output = run("stat", f"dir://{root}")
    assert status == 0
    assert "30" in output
    assert "146.5 KiB" in output  # 30 objects of 5,000 bytes
    assert "In all 40 objects in 320.0 KiB; capacity: no bound known." in output


def test_verify_of_a_good_store_is_silent_about_objects(root: Path) -> None:
    status, output = run("verify", f"dir://{root}")
    assert (status, output.strip()) == (
        0,
        "40 good, 0 damaged and removed, 0 unreadable, 0 gone meanwhile.",
    )


def test_verify_finds_every_kind_of_damage_removes_it_and_says_so(root: Path) -> None:
    files = [root / "objects" / f"{key(n, 'a')}.kv" for n in range(5)]
    for path in files[:2]:
        content = bytearray(path.read_bytes())
        content[200] ^= 1
        path.write_bytes(content)
    files[2].write_bytes(b"")
    files[3].write_bytes(files[4].read_bytes())
    status, output = run("verify", f"dir://{root}", "--namespace", "a")
    assert status == 1
    assert "26 good, 4 damaged and removed" in output
    assert f"damaged, removed: {key(3, 'a')}" in output
    status, output = run("verify", f"dir://{root}")
    assert (status, output.strip()) == (
        0,
        "36 good, 0 damaged and removed, 0 unreadable, 0 gone meanwhile.",
    )


def test_verify_counts_as_no_use(root: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in root.rglob("*.kv")}
    run("verify", f"dir://{root}")
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.kv")} == times


def test_rm_clears_one_namespace(root: Path) -> None:
    status, output = run("rm", f"dir://{root}", "--namespace", "a", "--yes")
    assert (status, output.strip()) == (0, "30 objects removed.")
    store = CheckedStore(DirectoryStore(root, 64 << 20))
    assert store.contains([key(1, "a"), key(1, "b")]) == [False, True]
    assert fetch(store, key(1, "b")) == payload(1)
    store.close()


def test_rm_asks_first(root: Path) -> None:
    status, output = run("rm", f"dir://{root}", "--namespace", "a", answer="n\n")
    assert status == 1
    assert "Remove 30 objects of 'a'?" in output
    assert "In all 40 objects" in run("stat", f"dir://{root}")[1]


@pytest.mark.parametrize(
    "args",
    [
        ("stat", "dir:///no/such/folder"),
        ("stat", "nonsense"),
        ("verify", "dri:///var/cache"),
        ("rm", "dir:///no/such/folder", "--namespace", "a", "--yes"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(args: tuple[str, ...]) -> None:
    status, output = run(*args)
    assert status == 2
    assert output.startswith("moonstep: store=")
    assert output.count("\n") == 1


def test_a_namespace_that_cannot_be_one_is_refused(root: Path) -> None:
    status, output = run("rm", f"dir://{root}", "--namespace", "..", "--yes")
    assert status == 2
    assert output.startswith("moonstep: namespace='..'")
    assert "In all 40 objects" in run("stat", f"dir://{root}")[1]
