"""The directory store itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

from moonstep.stores.base import Entry, Get, Key, Put, StoreUnwell, Transfer, Usage
from moonstep.stores.directory import objectfile
from moonstep.stores.directory.incoming import Incoming
from moonstep.stores.directory.objectfile import FOOTER_BYTES, Footer, Reading, parent_name
from moonstep.stores.directory.reads import Reads, UnmarkedReads
from moonstep.stores.directory.recency import Recency, Use, used_ns
from moonstep.stores.directory.space import Space
from moonstep.stores.directory.tree import Tree, disk_bytes
from moonstep.stores.tally import Tally
from moonstep.stores.urls import Opener, StoreUrl

logger = logging.getLogger(__name__)

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_HIT: Final = Get.HIT
"""Python looks a member up in its enumeration each time anew."""
_FOREIGN: Final = frozenset({errno.ELOOP, errno.EISDIR, errno.EAGAIN})
"""A symbolic link, a folder or a pipe: something is there, and it is none of ours."""
_ATTEMPTS: Final = 3


class Errors(Tally):
    """What the file system refused, counted by verb and reason; each kind is logged once."""

    def write(self, verb: str, error: OSError) -> None:
        kind = f"{verb} {errno.errorcode.get(error.errno or 0, 'unknown')}"
        if self.is_first(kind):
            logger.warning("directory store: %s (logged once, then counted): %s", kind, error)


class DirectoryStore:
    """A :class:`Store` of files in a folder on a local disk, shared by any number of processes.

    Whatever the file system refuses is an answer and a count, never an exception. Nothing is
    flushed to the disk on purpose: after a power failure files may be torn, which the check of
    their content finds. ``clock`` gives the time of day in nanoseconds.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        *,
        create: bool = True,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tree = Tree(root)
        self._tree.open(create=create)
        self._incoming = Incoming(self._tree)
        self._recency = Recency(self._tree)
        self._reads = UnmarkedReads(self._recency.touch_reads)
        self._space = Space(
            self._tree, self._incoming, capacity_bytes, before_evicting=self._reads.mark
        )
        self._clock = clock
        self.errors = Errors()
        self._is_closed = False

    @property
    def evicted(self) -> int:
        """Objects that this store, in this process, has evicted."""
        return self._space.evicted

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        return [self._size(key) is not None for key in keys]

    def put(self, items: Sequence[Transfer]) -> list[Put]:
        self._check_open()
        now_ns = self._clock()
        uses = [
            Use(item.key, item.parent, used_ns(now_ns, index)) for index, item in enumerate(items)
        ]
        # What makes room may be anything but what the batch's own chains have so far.
        protected_from_ns = self._recency.touch_heads(uses, now_ns)
        answers: list[Put] = []
        for item, use in zip(items, uses, strict=True):
            answers.append(self._put(item, use, protected_from_ns))
            protected_from_ns = min(protected_from_ns, use.used_ns)
        return answers

    def get(self, items: Sequence[Transfer]) -> list[Get]:
        self._check_open()
        now_ns = self._clock()
        readings = self._readings(items)
        reads = Reads(now_ns, {})
        answers = [self._answer(reading, reads) for reading in readings]
        self._reads.add(reads)
        return answers

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        return [self._remove(key) for key in keys]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._reads.close()
            self._incoming.close()
            self._space.close()

    def entries(self, namespace: str | None = None) -> Iterator[Entry]:
        self._check_open()
        self.mark_reads()
        for found in sorted(self._tree.walk(namespace), key=attrgetter("used_ns")):
            yield Entry(self._tree.key(found.path), max(0, found.file_bytes - FOOTER_BYTES))

    def usage(self) -> Usage:
        self._check_open()
        sizes = [found.disk_bytes for found in self._tree.walk()]
        return Usage(len(sizes), sum(sizes), self._space.capacity_bytes or None)

    def peek(self, items: Sequence[Transfer]) -> list[Get]:
        self._check_open()
        unmarked = Reads(0, {})
        return [self._answer(reading, unmarked) for reading in self._readings(items)]

    def mark_reads(self) -> None:
        """Mark what was read as used, now instead of in a moment."""
        self._reads.mark()

    def _readings(self, items: Sequence[Transfer]) -> list[Reading]:
        readings = [Reading(self._tree, item) for item in items]
        for reading in readings:
            reading.fill()
        return readings

    def _put(self, item: Transfer, use: Use, protected_from_ns: int) -> Put:
        try:
            path = self._tree.path(item.key)
            there_bytes = self._size(item.key)
            if there_bytes == item.nbytes + FOOTER_BYTES:
                self._recency.touch([use])
                return Put.ALREADY_THERE
            nbytes = disk_bytes(item.nbytes + FOOTER_BYTES)
            if not self._reserve(nbytes, protected_from_ns):
                return Put.NO_SPACE
            try:
                self._write(path, item, use.used_ns)
            except BaseException:
                self._space.give_back(nbytes)
                raise
            self._space.settle(nbytes)
            self._space.removed(disk_bytes(there_bytes or 0))
        except OSError as error:
            self.errors.write("put", error)
            return Put.NO_SPACE if error.errno in _NO_SPACE else Put.FAILED
        self._recency.remember([use])
        return Put.STORED

    def _reserve(self, nbytes: int, protected_from_ns: int) -> bool:
        try:
            return self._space.reserve(nbytes, protected_from_ns)
        except FileNotFoundError:
            self._tree.restore()
            return self._space.reserve(nbytes, protected_from_ns)

    def _write(self, path: str, item: Transfer, used_ns: int) -> None:
        footer = Footer(item.nbytes, parent_name(item.key, item.parent))
        beside = self._write_beside(item, footer, used_ns)
        try:
            self._rename(beside, path)
        except OSError:
            _unlink(beside)
            raise

    def _write_beside(self, item: Transfer, footer: Footer, used_ns: int) -> str:
        for attempt in range(_ATTEMPTS):
            beside = self._new_path()
            try:
                objectfile.write(beside, item.spans, footer, used_ns)
            except FileNotFoundError:
                # Somebody has removed our folder.
                if attempt == _ATTEMPTS - 1:
                    raise
                self._incoming.renew()
            except OSError:
                _unlink(beside)
                raise
            else:
                return beside
        raise AssertionError("unreachable")

    def _new_path(self) -> str:
        try:
            return self._incoming.new_path()
        except FileNotFoundError:
            # Somebody has removed the folders. Make them again, if it is still our disk.
            self._tree.restore()
            return self._incoming.new_path()

    def _rename(self, beside: str, path: str) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                os.rename(beside, path)
            except FileNotFoundError:
                # The first object of its kind; or its folder was empty and swept away just now.
                if attempt == _ATTEMPTS - 1:
                    raise
                self._tree.make_folder(path)
            else:
                return

    def _answer(self, reading: Reading, reads: Reads) -> Get:
        """What became of it; a hit is added to the reads."""
        if reading.error is not None:
            return self._failure(reading.error)
        footer = reading.footer()
        if footer is None:
            return Get.DAMAGED
        reads.parents[reading.key] = footer.parent
        return _HIT

    def _failure(self, error: OSError) -> Get:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return Get.MISS
        self.errors.write("get", error)
        return Get.DAMAGED if error.errno in _FOREIGN else Get.FAILED

    def _remove(self, key: Key) -> bool:
        try:
            file_bytes = self._size(key)
            os.unlink(self._tree.path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            self.errors.write("remove", error)
            return False
        self._space.removed(disk_bytes(file_bytes or 0))
        return True

    def _size(self, key: Key) -> int | None:
        """Bytes of the object's file; ``None`` when there is none, or none that can be seen."""
        try:
            return os.stat(self._tree.path(key), follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.errors.write("contains", error)
            return None

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnwell("the directory store is closed")


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def backend(url: StoreUrl) -> Opener:
    """``dir:///path?capacity=200GiB``. The capacity may be left out only to inspect a store."""
    url.check_params(("capacity",))
    if url.host or not url.path.strip("/"):
        raise url.error('the path has to be absolute: "dir:///path?capacity=200GiB"')
    capacity_bytes = url.size("capacity")
    if capacity_bytes is None and not url.inspecting:
        raise url.error('say how large it may grow: "?capacity=200GiB"')
    if capacity_bytes == 0:
        raise url.error("a store of no capacity keeps nothing: give more, or no store")
    root = Path(url.path)
    return lambda: DirectoryStore(root, capacity_bytes or 0, create=not url.inspecting)
