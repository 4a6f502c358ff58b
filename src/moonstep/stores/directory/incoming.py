"""Half-written objects: each process writes in a folder of its own, which dies with it."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import threading

from moonstep.stores.directory.filelock import is_the_file, try_lock
from moonstep.stores.directory.tree import FILE_MODE, FOLDER_MODE, Tree

_LOCK_SUFFIX = ".lock"


class Incoming:
    """This process's folder below ``incoming``, made when the first object is written.

    A lock that the kernel drops with the process tells the living from the dead; process numbers
    would not, since they come again and mean nothing in another container. Safe from any thread.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._folder = ""
        self._fd = -1
        self._numbers = itertools.count()

    def new_path(self) -> str:
        """A path where nothing is, to write an object to. Raises ``OSError``."""
        with self._lock:
            if self._fd < 0:
                self._claim()
            return f"{self._folder}/{next(self._numbers)}"

    def renew(self) -> None:
        """Claim a new folder at the next call: ours has been removed under us."""
        with self._lock:
            self._let_go()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                shutil.rmtree(self._folder, ignore_errors=True)
                _unlink(self._folder + _LOCK_SUFFIX)
                self._let_go()

    def clean(self) -> int:
        """Remove what processes that have ended left behind. How many others are alive."""
        alive = 0
        names = _names(self._tree.incoming)
        for name in names:
            path = os.path.join(self._tree.incoming, name)
            if path in (self._folder, self._folder + _LOCK_SUFFIX):
                continue
            if name.endswith(_LOCK_SUFFIX):
                alive += not _bury(path)
            elif not os.path.lexists(path + _LOCK_SUFFIX):
                # Not a folder, or one whose lock is gone: the lock comes first and goes last.
                _remove(path)
        return alive

    def _claim(self) -> None:
        while True:
            folder = os.path.join(self._tree.incoming, secrets.token_hex(8))
            fd = os.open(folder + _LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            # Between these lines another process may take it for that of a dead one, and remove it.
            if try_lock(fd) and is_the_file(fd, folder + _LOCK_SUFFIX):
                break
            os.close(fd)
        try:
            os.mkdir(folder, FOLDER_MODE)
        except OSError:
            os.close(fd)
            raise
        self._folder, self._fd = folder, fd

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._folder, self._fd = "", -1


def _bury(lock_path: str) -> bool:
    """Remove a dead process's folder and lock. False when it is alive."""
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        if not try_lock(fd):
            return False
        shutil.rmtree(lock_path.removesuffix(_LOCK_SUFFIX), ignore_errors=True)
        _unlink(lock_path)
        return True
    finally:
        os.close(fd)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        _unlink(path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
