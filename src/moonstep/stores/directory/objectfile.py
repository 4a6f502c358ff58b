"""One object's file: the bytes that were put, and a footer that frames them.

The footer tells how many bytes there are and which object comes before this one in its chain, with
a checksum of its own. It is the directory's frame; what the bytes mean is checked by
``moonstep.stores.checked``.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import xxhash

from moonstep.stores.base import Get, Key
from moonstep.stores.directory.tree import FILE_MODE

_MAGIC: Final = b"MDF1"
_PARENT_BYTES: Final = 66
_FIELDS: Final = struct.Struct(f"<4sHQ{_PARENT_BYTES}s")
_CHECKSUM_BYTES: Final = 8
FOOTER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES

_MOST_SPANS: Final = os.sysconf("SC_IOV_MAX")
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a named pipe that somebody put there would wait for a writer.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Footer(NamedTuple):
    """``parent`` is the last part of the parent's key; empty where there is none."""

    nbytes: int
    parent: str

    def pack(self) -> bytes:
        name = self.parent.encode()
        if len(name) > _PARENT_BYTES:
            # The chain's order cannot be kept for it; the bytes are as good as any.
            name = b""
        fields = _FIELDS.pack(_MAGIC, len(name), self.nbytes, name)
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def parse(cls, footer: bytes | bytearray) -> Footer | None:
        """What a footer says; ``None`` when it is none of ours, or damaged.

        >>> Footer.parse(Footer(7, "ab").pack())
        Footer(nbytes=7, parent='ab')
        >>> Footer.parse(bytes(FOOTER_BYTES)) is None
        True
        """
        raw = bytes(footer)
        fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size :]
        if len(checksum) != _CHECKSUM_BYTES or xxhash.xxh3_64_digest(fields) != checksum:
            return None
        magic, length, nbytes, name = _FIELDS.unpack(fields)
        if magic != _MAGIC or length > _PARENT_BYTES:
            return None
        return cls(nbytes, name[:length].decode())


def parent_name(key: Key, parent: Key | None) -> str:
    """What the footer keeps of a parent: the last part of its key, if all else is the key's.

    >>> parent_name(Key("a/b/2"), Key("a/b/1")), parent_name(Key("a/b/2"), Key("a/c/1"))
    ('1', '')
    """
    folder = key.rpartition("/")[0]
    parent_folder, _, name = (parent or "").rpartition("/")
    return name if parent_folder == folder else ""


def sibling(key: Key, name: str) -> Key | None:
    """The inverse: the key beside ``key`` whose last part is ``name``."""
    return Key(f"{key.rpartition('/')[0]}/{name}") if name else None


def write(path: str, spans: Sequence[memoryview], footer: Footer, used_ns: int) -> None:
    """Write a new file. Raises ``OSError``, and then has left what it had written so far."""
    fd = os.open(path, _WRITE_FLAGS, FILE_MODE)
    try:
        frame = memoryview(footer.pack())
        nbytes = sum([span.nbytes for span in spans]) + FOOTER_BYTES
        _move_all(os.writev, fd, [*spans, frame], nbytes)
        os.utime(fd, ns=(used_ns, used_ns))
    finally:
        os.close(fd)


class Read(NamedTuple):
    """What became of reading a file: for a hit, its parent's name, and when it was used last."""

    answer: Get
    parent: str = ""
    used_ns: int = 0


_DAMAGED: Final = Read(Get.DAMAGED)


def read(path: str, spans: Sequence[memoryview]) -> Read:
    """Fill the spans from a file, in one call if the system allows. Raises ``OSError``."""
    nbytes = sum([span.nbytes for span in spans])
    frame = bytearray(FOOTER_BYTES)
    fd = os.open(path, _READ_FLAGS)
    try:
        status = os.fstat(fd)
        if status.st_size != nbytes + FOOTER_BYTES or not stat.S_ISREG(status.st_mode):
            return _DAMAGED
        is_whole = _move_all(os.readv, fd, [*spans, memoryview(frame)], status.st_size)
    finally:
        os.close(fd)
    footer = Footer.parse(frame)
    if not is_whole or footer is None or footer.nbytes != nbytes:
        return _DAMAGED
    return Read(Get.HIT, footer.parent, status.st_mtime_ns)


def read_parent(path: str) -> str:
    """The parent's name as the footer has it; empty when there is none or the file is damaged.

    Raises ``OSError``.
    """
    fd = os.open(path, _READ_FLAGS)
    try:
        size = os.fstat(fd).st_size
        footer = Footer.parse(os.pread(fd, FOOTER_BYTES, max(0, size - FOOTER_BYTES)))
    finally:
        os.close(fd)
    return "" if footer is None else footer.parent


def _move_all(
    move: Callable[[int, Sequence[memoryview]], int],
    fd: int,
    spans: list[memoryview],
    nbytes: int,
) -> bool:
    """Carry on until every span is done, ``nbytes`` in all. False when the file ended first."""
    moved = move(fd, spans) if len(spans) <= _MOST_SPANS else 0
    if moved == nbytes:
        return True
    left = _rest([span for span in spans if span.nbytes], moved)
    while left:
        moved = move(fd, left[:_MOST_SPANS])
        if moved == 0:
            return False
        left = _rest(left, moved)
    return True


def _rest(spans: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of the spans after their first ``moved`` bytes."""
    done = 0
    while done < len(spans) and moved >= spans[done].nbytes:
        moved -= spans[done].nbytes
        done += 1
    return [spans[done][moved:], *spans[done + 1 :]] if moved else spans[done:]
