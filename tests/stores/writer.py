"""A process that writes to a directory store until it is killed: ``writer.py ROOT CAPACITY SEED``.

It says ``writing`` on its standard output once its first object is stored.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from moonstep.stores.base import Key, Transfer
from moonstep.stores.checked import CheckedStore
from moonstep.stores.directory import DirectoryStore
from moonstep.stores.testing import key

OBJECTS = 400
CHAIN_OBJECTS = 20
PIECES = 4


def content(number: int) -> bytes:
    """The bytes of an object: quickly made, and different from every other's."""
    return number.to_bytes(8, "little") * (8 << 10)


def chain(start: int) -> list[Transfer]:
    """Ten objects of a chain, in pieces, each with its parent."""
    numbers = range(start, start + CHAIN_OBJECTS // 2)
    parents: list[Key | None] = [None, *map(key, numbers)]
    if start % CHAIN_OBJECTS:
        parents[0] = key(start - 1)
    return [
        Transfer(key(number), pieces(content(number)), parent)
        for number, parent in zip(numbers, parents, strict=False)
    ]


def pieces(content: bytes) -> tuple[memoryview, ...]:
    step = len(content) // PIECES
    view = memoryview(content)
    return tuple(view[start : start + step] for start in range(0, len(content), step))


def main(root: str, capacity_bytes: str, seed: str) -> None:
    rng = random.Random(int(seed))
    store = CheckedStore(DirectoryStore(Path(root), int(capacity_bytes)))
    is_first = True
    while True:
        start = rng.randrange(0, OBJECTS, CHAIN_OBJECTS // 2)
        store.put(chain(start))
        store.remove([key(rng.randrange(OBJECTS))])
        if is_first:
            print("writing", flush=True)
            is_first = False


if __name__ == "__main__":
    main(*sys.argv[1:])
