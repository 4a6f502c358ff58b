"""One object's file: the bytes that were put, and a footer that frames them.

The footer tells how many bytes there are and which object comes before this one in its chain, with
a checksum of its own. It is the directory's frame; what the bytes mean is checked by
``moonstep.stores.checked``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import xxhash

from moonstep.stores.base import Key, Transfer
from moonstep.stores.directory.tree import FILE_MODE, Tree

Buffer = memoryview | bytearray | bytes

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
        fields = footer[: _FIELDS.size]
        if footer[_FIELDS.size :] != xxhash.xxh3_64_digest(fields):
            return None
        magic, length, nbytes, name = _FIELDS.unpack(fields)
        if magic != _MAGIC or length > _PARENT_BYTES:
            return None
        try:
            parent = name[:length].decode()
        except UnicodeDecodeError:
            return None
        # It becomes a part of a path.
        return cls(nbytes, parent) if parent.isprintable() and "/" not in parent else None


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
        _move_all(os.writev, fd, [*spans, memoryview(footer.pack())])
        os.utime(fd, ns=(used_ns, used_ns))
    finally:
        os.close(fd)


class Reading:
    """One object on its way from its file to memory: made, filled, and then asked what came of it.

    Three steps, so that a batch takes each of them for all its objects. What runs between two
    copies of many bytes finds the processor's caches full of those, and costs several times as
    much as in a loop of its own. ``error`` is why the file could not be read, if so.
    """

    __slots__ = ("_footer", "_moved", "_path", "_spans", "_want", "error", "key")

    def __init__(self, tree: Tree, item: Transfer) -> None:
        self.key = item.key
        # One byte more than there should be tells a longer file without another call.
        self._footer = bytearray(FOOTER_BYTES + 1)
        self._spans: list[memoryview | bytearray] = [*item.spans, self._footer]
        self._want = sum([span.nbytes for span in item.spans]) + FOOTER_BYTES
        self._moved = 0
        self._path = ""
        self.error: OSError | None = None
        try:
            self._path = tree.path(item.key)
        except OSError as error:
            self._give_up(error)

    def fill(self) -> None:
        """Read the file, in one call if the system allows."""
        if self.error is not None:
            return
        try:
            fd = os.open(self._path, _READ_FLAGS)
            try:
                moved = os.readv(fd, self._spans) if len(self._spans) <= _MOST_SPANS else 0
                if moved != self._want:
                    moved += _move_all(os.readv, fd, _rest(self._spans, moved))
                self._moved = moved
            finally:
                os.close(fd)
        except OSError as error:
            self._give_up(error)

    def footer(self) -> Footer | None:
        """The footer, if the file was whole; ``None`` for what is no object of this size.

        What is no file of bytes has no footer of ours.
        """
        if self._moved != self._want:
            return None
        footer = Footer.parse(self._footer[:FOOTER_BYTES])
        return footer if footer and footer.nbytes == self._want - FOOTER_BYTES else None

    def _give_up(self, error: OSError) -> None:
        # The traceback holds this frame, and so the memory, for as long as the error lives.
        self.error = error.with_traceback(None)


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
    move: Callable[[int, Sequence[Buffer]], int], fd: int, spans: Sequence[Buffer]
) -> int:
    """Carry on until every span is done or the file has ended. The bytes that were moved."""
    left = _rest(spans, 0)
    done = 0
    while left:
        moved = move(fd, left[:_MOST_SPANS])
        if moved == 0:
            break
        done += moved
        left = _rest(left, moved)
    return done


def _rest(spans: Sequence[Buffer], moved: int) -> list[memoryview]:
    """What is left of the spans after their first ``moved`` bytes; no span of it is empty."""
    left: list[memoryview] = []
    for each in spans:
        span = memoryview(each)
        if moved < span.nbytes:
            left.append(span[moved:])
        moved = max(0, moved - span.nbytes)
    return left
