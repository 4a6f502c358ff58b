"""``moonstep bench store``: push and fetch of the directory store against plain files.

A push is a batched ``put`` from scattered slots of an arena, a fetch a batched ``get`` into them,
with the header and the checksum of every object (``checked``) or without (``bare``). The reference
writes, or reads, as many files of the same size from one contiguous piece of the same arena. They
alternate within one run on one file system, and both leave it to the system when the bytes reach
the disk: what is compared is the work of a push, not the disk. That a fetched object was used is
marked on its file after the fetch, by another thread; here it is done, and timed, in between.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moonstep.bench.machine import machine_facts
from moonstep.keys import Key, KeyMaker
from moonstep.stores.base import Get, Put, Store, Transfer
from moonstep.stores.checked import CheckedStore
from moonstep.stores.directory import DirectoryStore
from moonstep.worker.arena import Arena

ARENA_BYTES: Final = 512 << 20
SAMPLE_BYTES: Final = 64 << 20
DEMANDED_SHARE: Final = 0.5
START_OBJECTS: Final = 100_000
DEMANDED_START_S: Final = 2.0
BOOTSTRAPS: Final = 2000
Answer = TypeVar("Answer")
MAKER: Final = KeyMaker("bench", "0" * 32)


@dataclass(frozen=True, slots=True)
class Shape:
    """Objects of so many slots, each of so many bytes."""

    name: str
    slots: int
    slot_bytes: int

    @property
    def object_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def objects(self) -> int:
        """Of one sample."""
        return max(1, SAMPLE_BYTES // self.object_bytes)


SHAPES: Final = (
    Shape("tiny model, 1 block", 1, 64 << 10),
    Shape("SmolLM2-135M bf16, 1 block of 32", 1, 720 << 10),
    Shape("SmolLM2-135M bf16, 8 blocks of 32", 8, 720 << 10),
    Shape("Llama-8B bf16, 16 blocks of 16", 16, 2 << 20),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One verb on one shape. Rates in bytes a second; ``share`` is of the plain files' rate.

    ``mark_us`` is what it takes an object to be marked as used after a fetch, in microseconds.
    """

    shape: str
    object_bytes: int
    verb: str
    store: str
    samples: int
    rate: float
    plain_rate: float
    share: float
    share_low: float
    share_high: float
    mark_us: float = 0.0

    @property
    def is_demanded(self) -> bool:
        return self.store == "checked"

    @property
    def holds(self) -> bool:
        return not self.is_demanded or self.share >= DEMANDED_SHARE


class Bench:
    """A worker's arena of random bytes; a folder with a directory store and plain files."""

    def __init__(self, shape: Shape, folder: Path, arena_bytes: int, seed: int) -> None:
        self.shape = shape
        self._folder = folder
        self._owner = Arena(arena_bytes // shape.slot_bytes, shape.slot_bytes)
        self._arena = self._owner.memory.data
        rng = np.random.default_rng(seed)
        self._owner.memory[:] = rng.integers(0, 256, self._owner.nbytes, np.uint8)
        self._slots = rng.permutation(self._owner.slots).tolist()
        self._at = 0
        self._directory = DirectoryStore(folder / "store", 1 << 60)
        self.stores: dict[str, Store] = {
            "bare": self._directory,
            "checked": CheckedStore(self._directory),
        }
        (folder / "plain").mkdir()

    def timed_push(self, store: Store) -> float:
        transfers = self._transfers()
        answers, seconds = _timed(lambda: store.put(transfers))
        assert answers == [Put.STORED] * len(transfers)
        return seconds

    def timed_fetch(self, store: Store) -> float:
        transfers = self._transfers()
        answers, seconds = _timed(lambda: store.get(transfers))
        assert answers == [Get.HIT] * len(transfers)
        return seconds

    def timed_marks(self) -> float:
        return _timed(self._directory.mark_reads)[1]

    def timed_write(self) -> float:
        views, paths = self._contiguous(), self._paths()

        def write() -> None:
            for path, view in zip(paths, views, strict=True):
                with open(path, "wb", buffering=0) as file:
                    file.write(view)

        return _timed(write)[1]

    def timed_read(self) -> float:
        views, paths = self._contiguous(), self._paths()

        def read() -> None:
            for path, view in zip(paths, views, strict=True):
                with open(path, "rb", buffering=0) as file:
                    file.readinto(view)

        return _timed(read)[1]

    def forget(self, store: Store) -> None:
        """Remove a sample's objects and files, so that the next one writes anew."""
        store.remove(self._keys())
        for path in self._paths():
            os.unlink(path)

    def close(self) -> None:
        self._directory.close()
        self._owner.close()
        shutil.rmtree(self._folder / "plain")
        shutil.rmtree(self._folder / "store")

    def _keys(self) -> list[Key]:
        return [MAKER.key(0, 0, index.to_bytes(32)) for index in range(self.shape.objects)]

    def _paths(self) -> list[str]:
        return [f"{self._folder}/plain/{index}" for index in range(self.shape.objects)]

    def _transfers(self) -> list[Transfer]:
        return [Transfer(key, self._take(self.shape.slots)) for key in self._keys()]

    def _take(self, slots: int) -> tuple[memoryview, ...]:
        """The next slots of a fixed round, so that what is taken was longest left alone."""
        nbytes = self.shape.slot_bytes
        taken = [self._slots[(self._at + i) % len(self._slots)] for i in range(slots)]
        self._at += slots
        return tuple(self._arena[slot * nbytes : (slot + 1) * nbytes] for slot in taken)

    def _contiguous(self) -> list[memoryview]:
        nbytes = self.shape.object_bytes
        room = len(self._arena) // nbytes
        first = self._at // self.shape.slots
        self._at += self.shape.objects * self.shape.slots
        starts = [(first + index) % room * nbytes for index in range(self.shape.objects)]
        return [self._arena[start : start + nbytes] for start in starts]


def measure(
    shape: Shape, repeats: int, folder: Path, arena_bytes: int = ARENA_BYTES, seed: int = 0
) -> Iterator[Measured]:
    """Push and fetch of one shape, with and without checks. Yields once all samples are taken."""
    bench = Bench(shape, folder, arena_bytes, seed)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    marks_s: list[float] = []
    try:
        # The first round finds folders to be made and memory to be faulted in.
        for repeat in range(repeats + 1):
            for name, store in bench.stores.items():
                pushed = bench.timed_push(store), bench.timed_write()
                fetch_s = bench.timed_fetch(store)
                marks_s.append(bench.timed_marks())
                fetched = fetch_s, bench.timed_read()
                bench.forget(store)
                if repeat:
                    pairs.setdefault(("push", name), []).append(pushed)
                    pairs.setdefault(("fetch", name), []).append(fetched)
    finally:
        bench.close()
    for (verb, name), samples in pairs.items():
        made = summary(shape, verb, name, samples)
        mark_us = float(np.median(marks_s)) / shape.objects * 1e6 if verb == "fetch" else 0.0
        yield replace(made, mark_us=mark_us)


def timed_start(root: Path, objects: int) -> float:
    """Seconds from opening a store of so many objects until its first write is done.

    The first write is what counts the objects; reading needs no count. Their files are empty, since
    nobody looks into them.
    """
    DirectoryStore(root, 1 << 60).close()
    folder = root / "objects" / MAKER.key(0, 0, b"").rstrip("/")
    folder.mkdir(parents=True)
    for index in range(objects):
        os.close(os.open(f"{folder}/{index:064x}.kv", os.O_CREAT | os.O_WRONLY, 0o600))
    one = Transfer(MAKER.key(0, 0, b"\xff" * 32), (memoryview(bytes(4096)),))
    start_s = time.perf_counter()
    store = DirectoryStore(root, 1 << 60)
    assert store.put([one]) == [Put.STORED]
    taken_s = time.perf_counter() - start_s
    store.close()
    return taken_s


def summary(
    shape: Shape, verb: str, store: str, pairs: list[tuple[float, float]], seed: int = 0
) -> Measured:
    """Medians of paired samples ``(seconds of the store, seconds of plain files)``.

    >>> made = summary(Shape("s", 2, 32 << 20), "push", "bare", [(2.0, 1.0), (4.0, 2.0)])
    >>> made.share, made.share_low, made.share_high
    (0.5, 0.5, 0.5)
    """
    store_s, plain_s = np.array(pairs).T
    shares = plain_s / store_s
    draws = np.random.default_rng(seed).choice(shares, (BOOTSTRAPS, len(shares)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    nbytes = shape.objects * shape.object_bytes
    return Measured(
        shape=shape.name,
        object_bytes=shape.object_bytes,
        verb=verb,
        store=store,
        samples=len(pairs),
        rate=float(nbytes / np.median(store_s)),
        plain_rate=float(nbytes / np.median(plain_s)),
        share=float(np.median(shares)),
        share_low=float(low),
        share_high=float(high),
    )


def store(repeats: int = 15, folder: Path | None = None, json_path: Path | None = None) -> None:
    """Compare push and fetch of the directory store with plain files; print, and write as JSON."""
    console = Console()
    machine = machine_facts()
    console.print(f"{machine}", highlight=False)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="moonstep-bench-", dir=folder) as scratch:
        for shape in track(SHAPES, "measuring", console=console, transient=True):
            found += measure(shape, repeats, Path(scratch))
        with console.status(f"making {START_OBJECTS:,} files"):
            start_s = timed_start(Path(scratch) / "large", START_OBJECTS)
    console.print(as_table(found))
    demanded = [made for made in found if made.is_demanded]
    console.print(
        f"At least {DEMANDED_SHARE:.0%} of plain files, checks included: "
        f"{sum(made.holds for made in demanded)} of {len(demanded)} figures; "
        f"the lowest is {min(made.share for made in demanded):.2f}."
    )
    console.print(
        f"Opening a store of {START_OBJECTS:,} objects and writing one more, which counts them: "
        f"{start_s:.2f} s (at most {DEMANDED_START_S:.0f} s)."
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": asdict(machine),
            "repeats": repeats,
            "sample_bytes": SAMPLE_BYTES,
            "measured": [asdict(made) for made in found],
            "start_objects": START_OBJECTS,
            "start_s": start_s,
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {json_path}")


def as_table(measured: list[Measured]) -> Table:
    table = Table(title="directory store and plain files", title_justify="left")
    table.add_column("object")
    for heading in ("MiB", "verb", "store", "GB/s", "plain GB/s", "share", "95 %", "mark us"):
        table.add_column(heading, justify="left" if heading in ("verb", "store") else "right")
    for made in measured:
        table.add_row(
            made.shape,
            f"{made.object_bytes / 2**20:.2f}",
            made.verb,
            made.store,
            f"{made.rate / 1e9:.2f}",
            f"{made.plain_rate / 1e9:.2f}",
            f"{made.share:.2f}" + ("" if made.holds else " (short)"),
            f"{made.share_low:.2f} to {made.share_high:.2f}",
            f"{made.mark_us:.1f}" if made.mark_us else "",
        )
    return table


def _timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    start_s = time.perf_counter()
    answer = call()
    return answer, time.perf_counter() - start_s
