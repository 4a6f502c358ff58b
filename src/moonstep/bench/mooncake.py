"""``moonstep bench store --store mooncake``: push and fetch beside Mooncake's own client.

A push is a batched ``put`` from scattered slots of an arena, a fetch a batched ``get`` into them,
with header and checksum. The reference is a client of Mooncake's package that puts and gets as many
objects of the same size from one contiguous piece of memory each. Both alternate in one run, and
neither gives memory to the store: the objects lie in a process of their own, so every byte crosses
loopback. Then a prompt's objects are looked for, as the scheduler's process does for each request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moonstep.bench.machine import machine_facts
from moonstep.bench.mooncake_pool import open_pool, opened, own_master, url_of
from moonstep.bench.store import SHAPES, Measured, Shape, summary
from moonstep.groups import Group, GroupKind
from moonstep.keys import Key, KeyMaker
from moonstep.scheduler.arrivals import keys_asked
from moonstep.scheduler.objects import all_of, object_shape, objects_of
from moonstep.stores.base import Get, Put, Store, Transfer
from moonstep.stores.checked import CheckedStore
from moonstep.stores.mooncake import package
from moonstep.stores.urls import StoreUrl, Use
from moonstep.worker.arena import Arena

ARENA_BYTES: Final = 256 << 20
DEMANDED_FROM_BYTES: Final = 512 << 10
"""Below this, one question more to the master and the header's share show."""
DEMANDED_SHARE: Final = 0.8
LOOKUP_TOKENS: Final = 131_072
CHUNK_TOKENS: Final = 256
BLOCK_TOKENS: Final = 16
DEMANDED_LOOKUP_S: Final = 0.002
MAKER: Final = KeyMaker("bench", "0" * 32)
_BUFFER_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Looked:
    """Looking for a prompt of which everything is stored. Times are medians.

    ``asking_s`` is spent on the scheduler's thread, ``answer_s`` on the thread that looks.
    """

    tokens: int
    keys: int
    looks: int
    asking_s: float
    answer_s: float
    answer_worst_s: float

    @property
    def holds(self) -> bool:
        return self.answer_s <= DEMANDED_LOOKUP_S


class Bench:
    """An arena, Moonstep's store over it, and Mooncake's own client over the same memory."""

    def __init__(self, url: str, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self._owner = Arena(ARENA_BYTES // shape.slot_bytes, shape.slot_bytes)
        rng = np.random.default_rng(seed)
        self._owner.memory[:] = rng.integers(0, 256, self._owner.nbytes, np.uint8)
        self._slots = rng.permutation(self._owner.slots).tolist()
        self._at = 0
        self._sample = 0
        self._store: Store = CheckedStore(opened(url, Use.SERVE))
        self._store.register(self._owner.memory.data)
        self._peer = _own_client(url)
        status = self._peer.register_buffer(self._owner.address, self._owner.nbytes)
        assert status == 0, status

    def sample(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """One push and one fetch of each; the verb, and the seconds of Moonstep and of the peer.

        Objects have keys of their own in each sample, and are removed at its end.
        """
        self._sample += 1
        ours, theirs = self._keys("m"), self._keys("p")
        yield "push", (self._push(ours), self._peer_put(theirs))
        yield "fetch", (self._fetch(ours), self._peer_get(theirs))
        self._peer.batch_remove([*ours, *theirs], True)

    def close(self) -> None:
        self._peer.close()
        self._store.close()
        self._owner.close()

    def _push(self, keys: list[Key]) -> float:
        transfers = self._transfers(keys)
        start_s = time.perf_counter()
        answers = self._store.put(transfers)
        taken_s = time.perf_counter() - start_s
        assert answers == [Put.STORED] * len(keys), answers
        return taken_s

    def _fetch(self, keys: list[Key]) -> float:
        transfers = self._transfers(keys)
        start_s = time.perf_counter()
        answers = self._store.get(transfers)
        taken_s = time.perf_counter() - start_s
        assert answers == [Get.HIT] * len(keys), answers
        return taken_s

    def _peer_put(self, keys: list[Key]) -> float:
        places, sizes = self._contiguous()
        start_s = time.perf_counter()
        answers = self._peer.batch_put_from(list(keys), places, sizes)
        taken_s = time.perf_counter() - start_s
        assert not any(answers), answers
        return taken_s

    def _peer_get(self, keys: list[Key]) -> float:
        places, sizes = self._contiguous()
        start_s = time.perf_counter()
        answers = self._peer.batch_get_into(list(keys), places, sizes)
        taken_s = time.perf_counter() - start_s
        assert list(answers) == sizes, answers
        return taken_s

    def _keys(self, whose: str) -> list[Key]:
        return [
            MAKER.key(0, 0, f"{whose}{self._sample}.{index}".encode())
            for index in range(self.shape.objects)
        ]

    def _transfers(self, keys: list[Key]) -> list[Transfer]:
        return [Transfer(key, self._take(self.shape.slots)) for key in keys]

    def _take(self, slots: int) -> tuple[memoryview, ...]:
        """The next slots of a fixed round, so that what is taken was longest left alone."""
        taken = [self._slots[(self._at + i) % len(self._slots)] for i in range(slots)]
        self._at += slots
        return tuple(self._owner.slot(slot).data for slot in taken)

    def _contiguous(self) -> tuple[list[int], list[int]]:
        nbytes = self.shape.object_bytes
        room = self._owner.nbytes // nbytes
        first = self._at // self.shape.slots
        self._at += self.shape.objects * self.shape.slots
        places = [
            self._owner.address + (first + index) % room * nbytes
            for index in range(self.shape.objects)
        ]
        return places, [nbytes] * len(places)


def _own_client(url: str) -> Any:
    """A client of Mooncake's package that gives nothing to the store."""
    master = StoreUrl.parse(url).host
    client = package.load().MooncakeDistributedStore()
    host = master.rpartition(":")[0]
    status = client.setup(host, "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", master)
    assert status == 0, status
    return client


def measure(url: str, shape: Shape, repeats: int) -> list[Measured]:
    """Push and fetch of one shape. The first sample, which finds memory to be faulted in, is left
    out."""
    bench = Bench(url, shape)
    pairs: dict[str, list[tuple[float, float]]] = {}
    try:
        for repeat in range(repeats + 1):
            for verb, taken in bench.sample():
                if repeat:
                    pairs.setdefault(verb, []).append(taken)
    finally:
        bench.close()
    return [summary(shape, verb, "checked", samples) for verb, samples in pairs.items()]


def look(url: str, looks: int, tokens: int = LOOKUP_TOKENS) -> Looked:
    """Look for a prompt all of whose objects are there: one group, one rank."""
    group = Group(0, GroupKind.FULL_ATTENTION, BLOCK_TOKENS, 1, ())
    shape = object_shape(group, CHUNK_TOKENS)
    names = [index.to_bytes(32, "big") for index in range(tokens // BLOCK_TOKENS)]
    filler, seeker = opened(url, Use.SERVE), opened(url, Use.LOOK_UP)
    asking_s, answer_s = [], []
    try:
        keys = keys_asked(MAKER, 1, all_of(shape, objects_of(shape, names, 0, len(names))))
        payload = memoryview(bytes(64))
        assert filler.put([Transfer(key, (payload,)) for key in keys]) == [Put.STORED] * len(keys)
        for _ in range(looks):
            start_s = time.perf_counter()
            keys = keys_asked(MAKER, 1, all_of(shape, objects_of(shape, names, 0, len(names))))
            asked_s = time.perf_counter()
            assert all(seeker.contains(keys))
            answer_s.append(time.perf_counter() - asked_s)
            asking_s.append(asked_s - start_s)
        filler.remove(keys)
    finally:
        filler.close()
        seeker.close()
    return Looked(
        tokens,
        len(keys),
        looks,
        float(np.median(asking_s)),
        float(np.median(answer_s)),
        max(answer_s),
    )


def mooncake(repeats: int, url: str | None, json_path: Path | None) -> None:
    """Measure over the store of ``url``, which others have given memory to, or over one of our own:
    a master and a process with memory, both ended afterwards. Print, and write as JSON."""
    console = Console()
    machine = machine_facts()
    console.print(f"{machine}", highlight=False)
    found: list[Measured] = []
    with ExitStack() as stack:
        if url is None:
            url = url_of(stack.enter_context(own_master()))
            stack.enter_context(open_pool(url))
        for shape in track(SHAPES, "measuring", console=console, transient=True):
            found += measure(url, shape, repeats)
        looked = look(url, 100)
    console.print(as_table(found))
    demanded = [made for made in found if made.object_bytes >= DEMANDED_FROM_BYTES]
    held = sum(made.share >= DEMANDED_SHARE for made in demanded)
    console.print(
        f"At least {DEMANDED_SHARE:.0%} of Mooncake's own client from {DEMANDED_FROM_BYTES >> 10} "
        f"KiB up, checks included: {held} of {len(demanded)} figures; the lowest is "
        f"{min(made.share for made in demanded):.2f}."
    )
    console.print(
        f"Looking for {looked.tokens:,} tokens ({looked.keys} objects, all there): "
        f"{looked.answer_s * 1e3:.2f} ms off the scheduler's thread (at most "
        f"{DEMANDED_LOOKUP_S * 1e3:.0f} ms; worst {looked.answer_worst_s * 1e3:.2f} ms), "
        f"{looked.asking_s * 1e3:.2f} ms on it to name the objects."
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": asdict(machine),
            "repeats": repeats,
            "measured": [asdict(made) for made in found],
            "lookup": asdict(looked),
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {json_path}")


def as_table(measured: list[Measured]) -> Table:
    table = Table(title="Mooncake store and Mooncake's own client", title_justify="left")
    table.add_column("object")
    for heading in ("MiB", "verb", "GB/s", "own client GB/s", "share", "95 %"):
        table.add_column(heading, justify="left" if heading == "verb" else "right")
    for made in measured:
        table.add_row(
            made.shape,
            f"{made.object_bytes / 2**20:.2f}",
            made.verb,
            f"{made.rate / 1e9:.2f}",
            f"{made.plain_rate / 1e9:.2f}",
            f"{made.share:.2f}",
            f"{made.share_low:.2f} to {made.share_high:.2f}",
        )
    return table
