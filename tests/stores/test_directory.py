"""What the directory store promises beyond the contract."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from moonstep.config import SettingError
from moonstep.stores.base import Get, Key, Put, Transfer
from moonstep.stores.directory import DirectoryStore, objectfile
from moonstep.stores.directory.objectfile import FOOTER_BYTES
from moonstep.stores.directory.tree import MARKER, file_system_of
from moonstep.stores.testing import fetch, incoming, key, outgoing, payload

SECOND_NS = 10**9
NBYTES = 5000
ON_DISK = 8192
"""What an object of ``NBYTES`` takes of the disk."""


class Clock:
    """A time of day that moves when told to."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


Open = Callable[..., DirectoryStore]


@pytest.fixture
def open_store(root: Path, clock: Clock) -> Iterator[Open]:
    """Opens the directory again and again, as several processes would."""
    opened: list[DirectoryStore] = []

    def open_one(objects: int = 100, **kwargs: bool) -> DirectoryStore:
        store = DirectoryStore(root, objects * ON_DISK, clock=clock, **kwargs)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def chain(*numbers: int, parent: int | None = None) -> list[Transfer]:
    """Objects of one chain, each the parent of the next; ``parent`` is before the first."""
    before = (parent, *numbers)
    return [
        Transfer(
            key(number), outgoing(key(number), payload(number)).spans, None if p is None else key(p)
        )
        for number, p in zip(numbers, before, strict=False)
    ]


def present(store: DirectoryStore, numbers: range) -> list[int]:
    there = store.contains([key(number) for number in numbers])
    return [number for number, is_there in zip(numbers, there, strict=True) if is_there]


class TestSharing:
    def test_a_second_opening_sees_what_the_first_stores(self, open_store: Open) -> None:
        first, second = open_store(), open_store()
        first.put(chain(1))
        assert fetch(second, key(1)) == payload(1)
        second.remove([key(1)])
        assert fetch(first, key(1)) is Get.MISS

    def test_objects_outlive_the_store(self, open_store: Open) -> None:
        first = open_store()
        first.put(chain(1, 2))
        first.close()
        assert present(open_store(), range(4)) == [1, 2]

    def test_all_openings_together_keep_one_bound(self, open_store: Open, clock: Clock) -> None:
        stores = [open_store(objects=20) for _ in range(3)]
        for number in range(100):
            clock.wait(10)
            assert stores[number % 3].put(chain(number)) == [Put.STORED]
            assert stores[0].usage().used_bytes <= 20 * ON_DISK
        assert stores[0].usage().objects > 15

    def test_a_closed_store_leaves_nothing_of_its_own(self, root: Path, open_store: Open) -> None:
        store = open_store()
        store.put(chain(1))
        assert os.listdir(root / "incoming")
        store.close()
        assert os.listdir(root / "incoming") == []


class TestEviction:
    def test_the_least_recently_used_chain_leaves_first(
        self, open_store: Open, clock: Clock
    ) -> None:
        store = open_store(objects=16)
        store.put(chain(*range(8)))
        clock.wait(10)
        store.put(chain(*range(10, 18)))
        clock.wait(10)
        store.get([incoming(key(n), NBYTES)[0] for n in range(8)])
        clock.wait(10)
        store.put(chain(20))
        assert present(store, range(8)) == [*range(8)]
        assert present(store, range(10, 18)) == [*range(10, 17)]

    @pytest.mark.parametrize("is_reopened", [False, True])
    def test_a_tail_leaves_before_its_head_though_it_was_stored_later(
        self, open_store: Open, clock: Clock, is_reopened: bool
    ) -> None:
        store = open_store(objects=16)
        store.put(chain(0, 1, 2))
        for first in (3, 6, 9):
            clock.wait(1000)
            if is_reopened:
                store = open_store(objects=16)
            store.put(chain(first, first + 1, first + 2, parent=first - 1))
        clock.wait(1000)
        store.put(chain(*range(20, 30)))
        assert present(store, range(20, 30)) == [*range(20, 30)]
        kept = present(store, range(12))
        assert kept == [*range(len(kept))]
        assert len(kept) < 7

    @pytest.mark.parametrize("is_reopened", [False, True])
    def test_reading_a_tail_keeps_its_head(
        self, open_store: Open, clock: Clock, is_reopened: bool
    ) -> None:
        store = open_store(objects=16)
        store.put(chain(*range(6)))
        clock.wait(1000)
        store.put(chain(*range(10, 16)))
        clock.wait(1000)
        if is_reopened:
            store = open_store(objects=16)
        store.get([incoming(key(n), NBYTES)[0] for n in (4, 5)])
        clock.wait(1000)
        store.put(chain(*range(20, 26)))
        assert present(store, range(6)) == [*range(6)]
        assert len(present(store, range(10, 16))) < 5

    def test_what_a_closed_store_had_read_counts_as_used(
        self, open_store: Open, clock: Clock
    ) -> None:
        first, second = open_store(objects=16), open_store(objects=16)
        first.put(chain(*range(8)))
        clock.wait(10)
        first.put(chain(*range(10, 18)))
        clock.wait(10)
        first.get([incoming(key(n), NBYTES)[0] for n in range(8)])
        first.close()
        clock.wait(10)
        second.put(chain(20))
        assert present(second, range(8)) == [*range(8)]
        assert present(second, range(10, 18)) == [*range(10, 17)]

    def test_a_listing_knows_what_was_read_just_now(self, open_store: Open, clock: Clock) -> None:
        store = open_store()
        for number in (1, 2):
            clock.wait(10)
            store.put(chain(number))
        clock.wait(10)
        fetch(store, key(1))
        assert [entry.key for entry in store.entries()] == [key(2), key(1)]

    def test_a_read_is_marked_afterwards(
        self, root: Path, open_store: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store()
        monkeypatch.setattr(store._reads, "_delay_s", 3600)
        store.put(chain(1, 2))
        files = sorted(root.rglob("*.kv"))
        before = [path.stat().st_mtime_ns for path in files]
        clock.wait(10)
        assert fetch(store, key(2)) == payload(2)
        assert [path.stat().st_mtime_ns for path in files] == before
        store.mark_reads()
        head_ns, tail_ns = (path.stat().st_mtime_ns for path in files)
        assert head_ns > tail_ns == clock()

    def test_a_late_mark_sets_no_time_back(
        self, root: Path, open_store: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late, other = open_store(), open_store()
        monkeypatch.setattr(late._reads, "_delay_s", 3600)
        late.put(chain(1))
        clock.wait(10)
        fetch(late, key(1))
        clock.wait(10)
        fetch(other, key(1))
        other.mark_reads()
        late.mark_reads()
        (path,) = root.rglob("*.kv")
        assert path.stat().st_mtime_ns == clock()

    def test_a_chain_longer_than_the_store_keeps_its_head(
        self, open_store: Open, clock: Clock
    ) -> None:
        store = open_store(objects=16)
        answers = store.put(chain(*range(10)))
        clock.wait(0.001)
        answers += store.put(chain(*range(10, 30), parent=9))
        assert answers == [Put.STORED] * 16 + [Put.NO_SPACE] * 14
        assert present(store, range(30)) == [*range(16)]

    def test_a_new_head_finds_room_though_all_was_used_in_this_moment(
        self, open_store: Open
    ) -> None:
        """The heads of chains that were used are marked ahead: that protects them from their own
        tails, and from nobody else."""
        store = open_store(objects=16)
        for head in range(0, 16, 2):
            store.put(chain(head))
            store.put(chain(head + 1, parent=head))
        for number in range(100, 110):
            assert store.put(chain(number)) == [Put.STORED]
        left = present(store, range(16))
        assert all(tail - 1 in left for tail in left if tail % 2)

    def test_an_object_larger_than_the_store_finds_no_space_and_evicts_nothing(
        self, open_store: Open, clock: Clock
    ) -> None:
        store = open_store(objects=2)
        store.put(chain(1))
        clock.wait(10)
        assert store.put([outgoing(key(2), bytes(5 * ON_DISK))]) == [Put.NO_SPACE]
        assert present(store, range(3)) == [1]

    def test_room_is_made_again_after_files_were_deleted_by_hand(
        self, root: Path, open_store: Open
    ) -> None:
        store = open_store(objects=4)
        store.put(chain(1, 2, 3, 4))
        for path in root.rglob("*.kv"):
            path.unlink()
        assert store.put(chain(5, 6, 7, 8)) == [Put.STORED] * 4

    def test_a_damaged_count_is_counted_anew(
        self, root: Path, open_store: Open, clock: Clock
    ) -> None:
        store = open_store(objects=16)
        store.put(chain(*range(16)))
        (root / "space").write_bytes(b"\xff" * 16)
        clock.wait(10)
        assert store.put(chain(20)) == [Put.STORED]
        assert store.usage().objects == 16

    def test_what_is_evicted_is_counted(self, open_store: Open, clock: Clock) -> None:
        store = open_store(objects=16)
        for number in range(20):
            clock.wait(1)
            store.put(chain(number))
        assert store.evicted == 20 - store.usage().objects


class TestForeignFiles:
    def test_a_folder_with_other_things_is_refused(self, root: Path, open_store: Open) -> None:
        root.mkdir()
        (root / "thesis.txt").write_text("years of work")
        with pytest.raises(SettingError, match=r"^moonstep: store=.*thesis.txt"):
            open_store()
        assert os.listdir(root) == ["thesis.txt"]

    def test_a_store_of_another_format_is_refused(self, root: Path, open_store: Open) -> None:
        open_store()
        (root / MARKER).write_text("moonstep directory store, format 2\n")
        with pytest.raises(SettingError, match=r"^moonstep: store="):
            open_store()

    def test_inspecting_makes_nothing(self, root: Path, open_store: Open) -> None:
        with pytest.raises(SettingError, match=r"^moonstep: store="):
            open_store(create=False)
        assert not root.exists()

    def test_foreign_files_among_the_objects_are_swept_away(
        self, root: Path, open_store: Open
    ) -> None:
        first = open_store()
        first.put(chain(1, 2))
        first.close()
        folder = next(root.rglob("*.kv")).parent
        (folder / "notes.txt").write_text("?")
        (folder / "half.kv.tmp").write_text("?")
        (folder / "link.kv").symlink_to("/etc/hostname")
        (root / "objects" / "empty" / "deep").mkdir(parents=True)
        open_store().put(chain(3))
        names = sorted(path.name for path in (root / "objects").rglob("*") if not path.is_dir())
        assert names == sorted(f"{n:064x}.kv" for n in (1, 2, 3))
        assert not (root / "objects" / "empty").exists()

    def test_nothing_is_swept_while_another_process_writes(
        self, root: Path, open_store: Open
    ) -> None:
        first = open_store()
        first.put(chain(1))
        note = next(root.rglob("*.kv")).parent / "notes.txt"
        note.write_text("?")
        open_store().put(chain(2))
        assert note.exists()

    @pytest.mark.parametrize(
        "kind", ["link", "folder", "pipe", "open pipe", "text", "empty", "longer", "shorter"]
    )
    def test_what_is_no_object_is_never_served(
        self, root: Path, open_store: Open, kind: str
    ) -> None:
        store = open_store()
        store.put(chain(1, 2))
        path = next(root.rglob(f"{1:064x}.kv"))
        other = path.with_name(f"{2:064x}.kv")
        whole = path.read_bytes()
        path.unlink()
        writer = -1
        match kind:
            case "link":
                path.symlink_to(other)
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "open pipe":
                os.mkfifo(path)
                writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            case "text":
                path.write_bytes(b"x" * other.stat().st_size)
            case "empty":
                path.touch()
            case "longer":
                path.write_bytes(whole + b"x")
            case "shorter":
                path.write_bytes(whole[:-1])
        assert fetch(store, key(1)) is Get.DAMAGED
        assert fetch(store, key(2)) == payload(2)
        if writer >= 0:
            os.close(writer)

    def test_half_written_objects_of_the_dead_go_and_those_of_the_living_stay(
        self, root: Path, open_store: Open
    ) -> None:
        living = open_store()
        living.put(chain(1))
        (mine,) = [path for path in (root / "incoming").iterdir() if path.is_dir()]
        (mine / "half").write_bytes(b"x")
        (root / "incoming" / "dead").mkdir()
        (root / "incoming" / "dead" / "half").write_bytes(b"x")
        (root / "incoming" / "dead.lock").touch()
        (root / "incoming" / "orphan").mkdir()
        (root / "incoming" / "stray").touch()
        other = open_store()
        other.put(chain(2))
        assert (mine / "half").exists()
        left = {path.name for path in (root / "incoming").iterdir()}
        assert not left & {"dead", "dead.lock", "orphan", "stray"}

    @pytest.mark.parametrize(
        "name", ["/etc/passwd", "a/../../b", "a", "a//b", ".a/b", "a/.b", "a/b\0", "a/" + "b" * 300]
    )
    def test_a_name_that_is_no_key_reaches_no_file(self, open_store: Open, name: str) -> None:
        store = open_store()
        assert store.contains([Key(name)]) == [False]
        assert store.put([outgoing(Key(name), payload(1))]) == [Put.FAILED]
        assert store.get([incoming(Key(name), NBYTES)[0]]) == [Get.FAILED]
        assert store.remove([Key(name)]) == [False]
        assert list(store.entries("../..")) == []


class TestPrivacy:
    def test_folders_are_0700_and_files_0600(self, root: Path, open_store: Open) -> None:
        before = os.umask(0)
        try:
            open_store().put(chain(1))
        finally:
            os.umask(before)
        for path in [root, *root.rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path


class TestTrouble:
    def test_deleted_from_under_it_all_is_missing_and_then_begins_again(
        self, root: Path, open_store: Open
    ) -> None:
        store = open_store()
        store.put(chain(1))
        shutil.rmtree(root)
        assert store.contains([key(1)]) == [False]
        assert fetch(store, key(1)) is Get.MISS
        assert store.remove([key(1)]) == [False]
        assert store.usage().objects == 0
        assert store.put(chain(1, 2)) == [Put.STORED] * 2
        assert fetch(store, key(2)) == payload(2)
        assert present(open_store(), range(4)) == [1, 2]

    @pytest.mark.parametrize("part", ["objects", "incoming", "space"])
    def test_any_part_may_be_deleted(self, root: Path, open_store: Open, part: str) -> None:
        store = open_store()
        store.put(chain(1))
        path = root / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert store.put(chain(2)) == [Put.STORED]
        assert fetch(store, key(2)) == payload(2)

    def test_no_view_of_the_memory_outlives_a_read(self, root: Path, open_store: Open) -> None:
        store = open_store()
        store.put(chain(1, 2))
        path = next(root.rglob(f"{2:064x}.kv"))
        path.unlink()
        path.symlink_to("/etc/hostname")
        memory = bytearray(5 * NBYTES)
        names = [key(1), key(2), key(3), Key("no key"), key(1)]
        sizes = [NBYTES] * 4 + [NBYTES - 1]
        gc.disable()
        try:
            answers = store.get(
                [
                    Transfer(name, (memoryview(memory)[index * NBYTES :][:nbytes],))
                    for index, (name, nbytes) in enumerate(zip(names, sizes, strict=True))
                ]
            )
            memory.clear()  # a BufferError, if the store has kept a view of it
        finally:
            gc.enable()
        assert answers == [Get.HIT, Get.DAMAGED, Get.MISS, Get.FAILED, Get.DAMAGED]

    def test_when_its_disk_is_gone_it_does_not_fill_the_one_below(
        self, root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store()
        shutil.rmtree(root)
        monkeypatch.setattr(store._tree, "_device", -7)
        assert store.put(chain(1)) == [Put.FAILED]
        assert not root.exists()
        assert store.errors.counts()["put ENXIO"] == 1

    def test_a_path_that_cannot_be_a_folder_is_refused_in_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SettingError, match=r"^moonstep: store=.*cannot be used") as refusal:
            DirectoryStore(tmp_path / "file" / "store", 1 << 20)
        assert "\n" not in str(refusal.value)

    def test_a_lock_that_is_not_let_go_costs_the_push_and_no_more(
        self, root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        holder, store = open_store(), open_store()
        holder.put(chain(1))
        monkeypatch.setattr(store._space._file, "_timeout_s", 0.05)
        with holder._space._file.held():
            assert store.put(chain(2)) == [Put.FAILED]
            assert fetch(store, key(1)) == payload(1)
        assert store.errors.counts() == {"put ETIMEDOUT": 1}
        assert store.put(chain(2)) == [Put.STORED]

    def test_the_file_system_is_named(self, tmp_path: Path) -> None:
        assert file_system_of("/proc") == "proc"


def in_mount_namespace(script: str, folder: Path) -> str:
    """Run Python as root of a user and mount namespace of its own, with ``FOLDER`` to mount on."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare(1)")
    can = subprocess.run(
        [unshare, "-rm", "mount", "-t", "tmpfs", "none", str(folder)], capture_output=True
    )
    if can.returncode:
        pytest.skip(f"may not mount here: {can.stderr.decode().strip()}")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [unshare, "-rm", sys.executable, "-c", textwrap.dedent(script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = """
import subprocess, sys
from pathlib import Path
from moonstep.stores.base import Get, Put
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.testing import fetch, key, outgoing, payload
folder = Path(sys.argv[1])
def mount(options):
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    subprocess.run(command, check=True)
def put(store, *numbers):
    return store.put([outgoing(key(n), payload(n)) for n in numbers])
"""


class TestRealTrouble:
    def test_a_full_disk(self, tmp_path: Path) -> None:
        script = """
        mount("size=256k")
        store = DirectoryStore(folder, 1 << 30)
        answers = put(store, *range(100))
        stored = answers.index(Put.NO_SPACE)
        assert 10 < stored < 40, stored
        assert set(answers[stored:]) == {Put.NO_SPACE}
        assert [fetch(store, key(n)) == payload(n) for n in range(100)] == [
            n < stored for n in range(100)
        ]
        assert store.errors.counts() == {"put ENOSPC": 100 - stored}
        assert store.remove([key(0), key(1)]) == [True, True]
        assert put(store, 50) == [Put.STORED]
        """
        in_mount_namespace(PRELUDE + textwrap.dedent(script), tmp_path)

    def test_a_disk_that_becomes_read_only(self, tmp_path: Path) -> None:
        script = """
        mount("size=1m")
        store = DirectoryStore(folder, 1 << 30)
        put(store, 1)
        store.close()
        store = DirectoryStore(folder, 1 << 30)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        for opened in (store, DirectoryStore(folder, 1 << 30)):
            assert opened.contains([key(1), key(2)]) == [True, False]
            assert fetch(opened, key(1)) == payload(1)
            assert put(opened, 1, 2) == [Put.ALREADY_THERE, Put.FAILED]
            assert opened.remove([key(1)]) == [False]
            assert opened.errors.counts() == {"put EROFS": 1, "remove EROFS": 1}
            opened.close()
        """
        in_mount_namespace(PRELUDE + textwrap.dedent(script), tmp_path)

    def test_a_disk_that_is_unmounted(self, tmp_path: Path) -> None:
        script = """
        mount("size=1m")
        store = DirectoryStore(folder / "store", 1 << 30)
        put(store, 1)
        subprocess.run(["umount", "-l", str(folder)], check=True)
        assert fetch(store, key(1)) is Get.MISS
        assert put(store, 2) == [Put.FAILED]
        assert list(folder.iterdir()) == []
        """
        in_mount_namespace(PRELUDE + textwrap.dedent(script), tmp_path)


def test_permission_denied(tmp_path: Path) -> None:
    """Root is never denied: a child becomes nobody first."""
    script = """
    import os, stat, tempfile
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    nobody = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(folder, nobody, -1)
    os.seteuid(nobody)
    store = DirectoryStore(folder / "store", 1 << 30)
    put(store, 1, 2)
    files = sorted((folder / "store" / "objects").rglob("*.kv"))
    files[0].chmod(0)
    assert fetch(store, key(1)) is Get.FAILED
    assert fetch(store, key(2)) == payload(2)
    files[0].parent.chmod(0)
    assert store.contains([key(1), key(2)]) == [False, False]
    assert fetch(store, key(2)) is Get.FAILED
    assert put(store, 3) == [Put.FAILED]
    files[0].parent.chmod(0o700)
    assert store.errors.counts() == {
        "get EACCES": 2, "contains EACCES": 3, "put EACCES": 1
    }
    assert fetch(store, key(2)) == payload(2)
    store.close()
    import shutil
    shutil.rmtree(folder)
    """
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


class TestObjectFile:
    def test_a_footer_that_is_damaged_in_any_bit_is_none(self) -> None:
        footer = objectfile.Footer(7, "ab" * 32).pack()
        for bit in range(len(footer) * 8):
            flipped = bytearray(footer)
            flipped[bit // 8] ^= 1 << bit % 8
            assert objectfile.Footer.parse(flipped) is None

    def test_a_parent_name_too_long_for_the_footer_is_left_out(self) -> None:
        footer = objectfile.Footer.parse(objectfile.Footer(7, "a" * 67).pack())
        assert footer == objectfile.Footer(7, "")

    @pytest.mark.parametrize("name", [b"\xff", b"a\0b", b"../b"])
    def test_a_parent_that_is_no_files_name_is_damage_of_one_object(
        self, name: bytes, root: Path, open_store: Open
    ) -> None:
        store = open_store()
        store.put(chain(1, 2, 3))
        path = next(root.rglob(f"{2:064x}.kv"))
        whole = path.read_bytes()
        fields = objectfile._FIELDS.pack(
            objectfile._MAGIC,
            len(name),
            objectfile.Footer.parse(whole[-FOOTER_BYTES:]).nbytes,
            name,
        )
        path.write_bytes(whole[:-FOOTER_BYTES] + fields + xxhash.xxh3_64_digest(fields))
        assert [fetch(store, key(n)) for n in (1, 2, 3)] == [payload(1), Get.DAMAGED, payload(3)]
        store.mark_reads()

    def test_a_circle_of_parents_ends(self, open_store: Open) -> None:
        store = open_store()
        one, two = chain(1, 2)
        store.put([Transfer(one.key, one.spans, two.key), two])
        assert open_store().put(chain(3, parent=2)) == [Put.STORED]
