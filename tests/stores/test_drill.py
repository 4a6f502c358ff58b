"""Drills of the directory store: writers killed, files damaged. Never a wrong byte.

The short forms run always; ``pytest -m drill`` runs the long ones.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonstep.keys import Key
from moonstep.stores import header
from moonstep.stores.base import Get, Put
from moonstep.stores.checked import CheckedInspection
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.testing import fetch, key, outgoing, payload
from tests.stores.writer import OBJECTS, content, pieces

OBJECT_BYTES = len(content(0))
CAPACITY_BYTES = OBJECTS // 2 * OBJECT_BYTES
"""Half of what the writers write, so that they evict all the time."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[CheckedInspection]:
    store = CheckedInspection(DirectoryStore(root, CAPACITY_BYTES))
    yield store
    store.close()


def start_writer(root: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stores.writer", str(root), str(CAPACITY_BYTES)]
    return subprocess.Popen(
        [*command, str(seed)],
        cwd=Path(__file__).parent.parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )


@dataclass
class Seen:
    hits: int = 0
    wrong: int = 0

    def look(self, store: CheckedInspection, number: int) -> None:
        """Ask for one object; whatever comes has to be that object."""
        got = fetch(store, key(number), OBJECT_BYTES)
        if isinstance(got, bytes):
            self.hits += 1
            self.wrong += got != content(number)


def kill_writers(root: Path, store: CheckedInspection, kills: int) -> None:
    """Writers are killed at a random moment of their writing, while this process reads."""
    rng, seen = random.Random(kills), Seen()
    for seed in range(kills):
        with start_writer(root, seed) as writer:
            try:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "writing\n"
                for _ in range(rng.randrange(60)):
                    seen.look(store, rng.randrange(OBJECTS))
            finally:
                writer.kill()
        assert store.usage().used_bytes <= CAPACITY_BYTES
    for number in range(OBJECTS):
        seen.look(store, number)
    assert seen.hits > 0
    assert seen.wrong == 0
    assert store.damaged.count == 0


def check_that_it_goes_on(root: Path, store: CheckedInspection) -> None:
    """After the last kill: what was left behind is cleaned up, and the books are right again."""
    assert store.put([outgoing(key(OBJECTS), content(OBJECTS))]) == [Put.STORED]
    assert len(list((root / "incoming").iterdir())) == 2  # ours: the writer's are gone
    assert store.usage().used_bytes <= CAPACITY_BYTES
    store.remove([entry.key for entry in store.entries()])
    assert store.usage().used_bytes == 0
    files = [path for path in (root / "objects").rglob("*") if not path.is_dir()]
    assert files == []
    half = range(OBJECTS // 4)
    answers = store.put([outgoing(key(n), content(n)) for n in half])
    assert answers == [Put.STORED] * len(half)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.drill)])
def test_a_writer_killed_at_any_moment_leaves_no_wrong_byte_and_no_litter(
    root: Path, store: CheckedInspection, kills: int
) -> None:
    kill_writers(root, store, kills)
    check_that_it_goes_on(root, store)


class Files:
    """Objects of two models, as files to be damaged."""

    def __init__(self, root: Path, store: CheckedInspection, count: int) -> None:
        self.root = root
        self.store = store
        self.count = count
        self.rng = random.Random(count)
        self.fill()

    def fill(self) -> None:
        """Store what is not there; all of it has to be there and right afterwards."""
        for number in range(self.count):
            for name in (key(number), self.other_models(number)):
                (answer,) = self.store.put([outgoing(name, self.content(name, number))])
                assert answer in (Put.STORED, Put.ALREADY_THERE)
                assert fetch(self.store, name, 3000) == self.content(name, number)

    def other_models(self, number: int) -> Key:
        return Key(f"contract/fedcba9876543210/0.0/{number:064x}")

    def content(self, name: Key, number: int) -> bytes:
        return payload(number if name == key(number) else -number - 1, 3000)

    def path(self, name: Key) -> Path:
        return self.root / "objects" / f"{name}.kv"

    def damage(self, how: Callable[[Files, int], None], numbers: list[int]) -> None:
        """Damage these, ask for all: none is served wrong, and every damaged one is counted."""
        before = self.store.damaged.count
        for number in numbers:
            how(self, number)
        answers = [fetch(self.store, key(number), 3000) for number in range(self.count)]
        for number, got in enumerate(answers):
            good = self.content(key(number), number)
            assert got == good if number not in numbers else got is Get.DAMAGED
        assert self.store.damaged.count - before == len(numbers)
        for number in numbers:
            assert not self.path(key(number)).exists()
        self.fill()


def flip_a_bit(files: Files, number: int) -> None:
    path = files.path(key(number))
    changed = bytearray(path.read_bytes())
    bit = files.rng.randrange(len(changed) * 8)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


def truncate(files: Files, number: int) -> None:
    path = files.path(key(number))
    with path.open("r+b") as file:
        file.truncate(files.rng.randrange(path.stat().st_size))


def overwrite_a_page_with_zeros(files: Files, number: int) -> None:
    """What a power failure leaves of a page that was never written."""
    path = files.path(key(number))
    changed = bytearray(path.read_bytes())
    changed[1000:2000] = bytes(1000)
    path.write_bytes(changed)


def put_another_models_file_there(files: Files, number: int) -> None:
    path = files.path(key(number))
    path.write_bytes(files.path(files.other_models(number)).read_bytes())


def put_an_old_version_back(files: Files, number: int) -> None:
    """The file as a version of Moonstep with another header wrote it."""
    path = files.path(key(number))
    whole = path.read_bytes()
    good = files.content(key(number), number)
    before, header.VERSION = header.VERSION, 0  # type: ignore[misc]
    try:
        old_header = header.seal(key(number), [memoryview(good)])
    finally:
        header.VERSION = before  # type: ignore[misc]
    path.write_bytes(old_header + whole[len(old_header) :])


def put_an_old_epoch_back(files: Files, number: int) -> None:
    """What lay under this block hash before the weights were changed."""
    old = Key(f"contract/00000000000000000/0.0/{number:064x}")
    files.store.put([outgoing(old, payload(number + 10**6, 3000))])
    files.path(key(number)).write_bytes(files.path(old).read_bytes())


DAMAGES = [
    flip_a_bit,
    truncate,
    overwrite_a_page_with_zeros,
    put_another_models_file_there,
    put_an_old_version_back,
    put_an_old_epoch_back,
]


@pytest.fixture(params=[40, pytest.param(1000, marks=pytest.mark.drill)])
def files(request: pytest.FixtureRequest, root: Path, store: CheckedInspection) -> Files:
    return Files(root, store, request.param)


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damaged_file_is_served_and_every_one_is_counted(
    files: Files, damage: Callable[[Files, int], None]
) -> None:
    files.damage(damage, [*range(files.count)])
    some = files.rng.sample(range(files.count), files.count // 3)
    files.damage(damage, some)


def test_files_whose_contents_were_swapped_are_not_served(files: Files) -> None:
    def swap_with_the_next(files: Files, number: int) -> None:
        if number % 2 == 0:
            one, other = files.path(key(number)), files.path(key(number + 1))
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)

    files.damage(swap_with_the_next, [*range(files.count)])


def test_pieces_make_up_the_content() -> None:
    assert b"".join(pieces(content(3))) == content(3)
