"""The size bound: bytes are reserved before they are written, and old objects make room."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

import xxhash

from moonstep.stores.directory.filelock import FileLock
from moonstep.stores.directory.incoming import Incoming
from moonstep.stores.directory.tree import ObjectFile, Tree

LOCK_TIMEOUT_S: Final = 5.0
KEPT_SHARE: Final = 15 / 16
"""How full a store is after old objects were evicted. The rest is room until the next time, and
takes in what other processes had reserved but not yet written when this one counted."""

_COUNT: Final = struct.Struct("<q")
_RECORD_BYTES: Final = _COUNT.size + 8


class Space:
    """How many bytes of the disk the store takes: one number, shared by all processes.

    A process that is killed leaves at worst a number that is too high, never one that is too low;
    the next count of the files puts it right. Counts happen when this process is the first to
    write, when the bound is reached, and when the number is missing. Safe from any thread.

    ``before_evicting`` marks what was used and is not marked yet; it raises nothing.
    """

    def __init__(
        self,
        tree: Tree,
        incoming: Incoming,
        capacity_bytes: int,
        before_evicting: Callable[[], None],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._tree = tree
        self._incoming = incoming
        self._before_evicting = before_evicting
        self._file = FileLock(os.path.join(tree.root, "space"), LOCK_TIMEOUT_S)
        self._is_counted = False
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        self._evicted = 0

    @property
    def evicted(self) -> int:
        """Objects that this process has evicted."""
        with self._lock:
            return self._evicted

    def reserve(self, nbytes: int, protected_from_ns: int) -> bool:
        """Take room for an object about to be written; False when there is none.

        Evicts least recently used objects if it has to, but none used at ``protected_from_ns`` or
        later: those are the chain that the new object belongs to. Raises ``OSError``.
        """
        if nbytes > self.capacity_bytes:
            return False
        with self._file.held() as fd:
            used = self._used_bytes(fd)
            if used + nbytes > self.capacity_bytes:
                used = self._evict(nbytes, protected_from_ns)
            fits = used + nbytes <= self.capacity_bytes
            if fits:
                used += nbytes
                self._add_reserved(nbytes)
            _write_count(fd, used)
        return fits

    def settle(self, nbytes: int) -> None:
        """A reserved object is written: it counts as a file from now on."""
        self._add_reserved(-nbytes)

    def give_back(self, nbytes: int) -> None:
        """A reserved object was not written."""
        self._add_reserved(-nbytes)
        self.removed(nbytes)

    def removed(self, nbytes: int) -> None:
        """Files of so many bytes are gone. When the number cannot be changed it stays too high."""
        if not nbytes:
            return
        with contextlib.suppress(OSError), self._file.held() as fd:
            used = _read_count(fd)
            if used is not None:
                _write_count(fd, max(0, used - nbytes))

    def close(self) -> None:
        self._file.close()

    def _used_bytes(self, fd: int) -> int:
        if not self._is_counted:
            # An earlier owner may have been killed: count, unless somebody alive has done so.
            self._is_counted = True
            if not self._incoming.clean():
                self._tree.sweep()
                return self._count()
        used = _read_count(fd)
        return self._count() if used is None else used

    def _count(self) -> int:
        return sum(found.disk_bytes for found in self._tree.walk()) + self._reserved()

    def _evict(self, need_bytes: int, protected_from_ns: int) -> int:
        """Remove the least recently used objects; the bytes that are taken afterwards."""
        self._before_evicting()
        self._incoming.clean()
        files = list(self._tree.walk())
        used = sum(found.disk_bytes for found in files) + self._reserved()
        target = min(int(self.capacity_bytes * KEPT_SHARE), self.capacity_bytes - need_bytes)
        for found in victims(files, used - target, protected_from_ns):
            try:
                os.unlink(found.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            else:
                self._add_evicted()
            used -= found.disk_bytes
        return used

    def _add_evicted(self) -> None:
        with self._lock:
            self._evicted += 1

    def _add_reserved(self, nbytes: int) -> None:
        with self._lock:
            self._reserved_bytes += nbytes

    def _reserved(self) -> int:
        with self._lock:
            return self._reserved_bytes


def victims(
    files: Sequence[ObjectFile], excess_bytes: int, protected_from_ns: int
) -> list[ObjectFile]:
    """What to evict: least recently used first, until it comes to ``excess_bytes``.

    >>> files = [ObjectFile(path, 4096, used_ns) for path, used_ns in (("new", 9), ("old", 1))]
    >>> [found.path for found in victims(files, 1, 10)]
    ['old']
    >>> [found.path for found in victims(files, 8192, 9)]
    ['old']
    """
    chosen: list[ObjectFile] = []
    for found in sorted(files, key=attrgetter("used_ns")):
        if excess_bytes <= 0 or found.used_ns >= protected_from_ns:
            break
        chosen.append(found)
        excess_bytes -= found.disk_bytes
    return chosen


def _read_count(fd: int) -> int | None:
    """The shared number; ``None`` when it was never written, or only in part."""
    record = os.pread(fd, _RECORD_BYTES, 0)
    number, checksum = record[: _COUNT.size], record[_COUNT.size :]
    if len(record) != _RECORD_BYTES or xxhash.xxh3_64_digest(number) != checksum:
        return None
    (used,) = _COUNT.unpack(number)
    return int(used)


def _write_count(fd: int, used: int) -> None:
    number = _COUNT.pack(used)
    os.pwrite(fd, number + xxhash.xxh3_64_digest(number), 0)
