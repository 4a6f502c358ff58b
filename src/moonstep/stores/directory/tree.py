"""The folders of a directory store: whose they are, and which file is which object."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonstep.config import SettingError
from moonstep.stores.base import Key

MARKER: Final = "moonstep-store"
MARKER_TEXT: Final = "moonstep directory store, format 1\n"
SUFFIX: Final = ".kv"
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
PAGE_BYTES: Final = 4096

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"}
    | {"smbfs", "virtiofs", "fuse.cephfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs"}
    | {"fuse.sshfs"}
)
"""Their locks and renames do not hold what this store builds on."""

_PART: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_KEY: Final = re.compile(rf"{_PART.pattern}(?:/{_PART.pattern})+")


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """One object's file as a walk over the tree finds it."""

    path: str
    file_bytes: int
    used_ns: int

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.file_bytes)


def disk_bytes(file_bytes: int) -> int:
    """What a file takes of the disk.

    >>> [disk_bytes(n) for n in (0, 1, 4096, 4097)]
    [0, 4096, 4096, 8192]
    """
    return -(-file_bytes // PAGE_BYTES) * PAGE_BYTES


class Tree:
    """The folders below ``root``. Nothing outside ``objects`` and ``incoming`` is ever removed."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.objects = os.path.join(self.root, "objects")
        self.incoming = os.path.join(self.root, "incoming")
        self._device = -1

    def open(self, *, create: bool) -> None:
        """Make sure that the folder is a store, or make it one.

        Raises:
            SettingError: when it is on a network file system, cannot be made or read, holds
                something else, or is a store of another format; without ``create``, when it is
                not there.
        """
        try:
            if create:
                os.makedirs(self.root, FOLDER_MODE, exist_ok=True)
            self._refuse_network()
            if not self._is_ours():
                if not create:
                    raise self._error("there is no store in this folder")
                self._make_ours()
            self._device = os.stat(self.root).st_dev
        except FileNotFoundError as error:
            raise self._error("there is no store in this folder") from error
        except OSError as error:
            raise self._error(f"the folder cannot be used: {error.strerror}") from error

    def restore(self) -> None:
        """Make the folders again after somebody removed them under a running store.

        Raises ``OSError``, also when what lies there now is another disk: then the store's own disk
        is gone, and nobody has allowed the one underneath.
        """
        root = self.root
        while not os.path.lexists(root):
            root = os.path.dirname(root)
        if os.stat(root).st_dev != self._device:
            raise OSError(errno.ENXIO, "the store's disk is gone", self.root)
        os.makedirs(self.root, FOLDER_MODE, exist_ok=True)
        self._make_folders()

    def make_folder(self, path: str) -> None:
        """Make the folders that an object's file goes into. Raises ``OSError``."""
        if not os.path.isdir(self.objects):
            self.restore()
        folder = self.objects
        for part in path[len(self.objects) + 1 :].split("/")[:-1]:
            folder = f"{folder}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, FOLDER_MODE)

    def path(self, key: Key) -> str:
        """The file of an object. Raises ``OSError`` (EINVAL) for what is no key."""
        if not _KEY.fullmatch(key):
            raise OSError(errno.EINVAL, "not a key", key)
        return f"{self.objects}/{key}{SUFFIX}"

    def key(self, path: str) -> Key:
        """The inverse of ``path``."""
        return Key(path[len(self.objects) + 1 : -len(SUFFIX)])

    def walk(self, namespace: str | None = None) -> Iterator[ObjectFile]:
        """Every object's file, in no order. Files that come or go meanwhile may be missed."""
        if namespace is not None and not _PART.fullmatch(namespace):
            return
        top = self.objects if namespace is None else os.path.join(self.objects, namespace)
        folders = [top]
        while folders:
            for entry in _entries(folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith(SUFFIX):
                    found = _object_file(entry)
                    if found is not None:
                        yield found

    def sweep(self) -> None:
        """Remove what is no object from among the objects, and folders that are empty."""
        self._sweep(self.objects, is_top=True)

    def _sweep(self, folder: str, *, is_top: bool = False) -> None:
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                self._sweep(entry.path)
            elif not entry.name.endswith(SUFFIX) or not entry.is_file(follow_symlinks=False):
                _ignore_errors(os.unlink, entry.path)
        if not is_top:
            _ignore_errors(os.rmdir, folder)

    def _is_ours(self) -> bool:
        try:
            with open(os.path.join(self.root, MARKER), encoding="utf-8") as file:
                text = file.read(len(MARKER_TEXT) + 1)
        except FileNotFoundError:
            return False
        if text != MARKER_TEXT:
            raise self._error(f"its {MARKER} is not of this format: give a new folder")
        return True

    def _make_ours(self) -> None:
        ours = {"objects", "incoming", "space", "lost+found"}
        others = [n for n in os.listdir(self.root) if n not in ours and not n.startswith(MARKER)]
        if others:
            remedy = f"it holds other things ({min(others)!r}): give an empty or a new folder"
            raise self._error(remedy)
        self._make_folders()

    def _make_folders(self) -> None:
        os.makedirs(self.objects, FOLDER_MODE, exist_ok=True)
        os.makedirs(self.incoming, FOLDER_MODE, exist_ok=True)
        # Written beside and renamed, since other processes may be looking for it now.
        beside = os.path.join(self.root, f"{MARKER}.{os.getpid()}.{threading.get_ident()}")
        with open(beside, "w", encoding="utf-8", opener=_private) as file:
            file.write(MARKER_TEXT)
        os.rename(beside, os.path.join(self.root, MARKER))

    def _refuse_network(self) -> None:
        kind = file_system_of(self.root)
        if kind in NETWORK_FILE_SYSTEMS:
            raise self._error(f"it lies on {kind}: a directory store needs a local file system")

    def _error(self, remedy: str) -> SettingError:
        return SettingError("store", f"dir://{self.root}", remedy)


def file_system_of(path: str) -> str:
    """The kind of file system that ``path`` lies on, as Linux calls it; empty when unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return ""
    kinds = [mount[mount.index("-") + 1] for mount in mounts if mount[2] == wanted]
    return kinds[-1] if kinds else ""


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _object_file(entry: os.DirEntry[str]) -> ObjectFile | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return ObjectFile(entry.path, status.st_size, status.st_mtime_ns)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


def _ignore_errors(remove: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(OSError):
        remove(path)
