"""A lock on a file, among threads and processes, that a frozen holder cannot hold us up with."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from moonstep.stores.directory.tree import FILE_MODE

_FIRST_POLL_S: Final = 0.000_05
_LAST_POLL_S: Final = 0.005
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FileLock:
    """An exclusive ``flock``. The kernel lets it go when its process ends, however it ends.

    The file may be removed under us: the lock is then taken on the file that is there now.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._threads = threading.Lock()
        self._fd = -1

    @contextmanager
    def held(self) -> Iterator[int]:
        """The descriptor of the locked file, for as long as the block lasts.

        Raises ``OSError``; ETIMEDOUT when another holder does not let go in time.
        """
        deadline = time.monotonic() + self._timeout_s
        if not self._threads.acquire(timeout=self._timeout_s):
            raise _timed_out(self._path)
        try:
            fd = self._locked(deadline)
            try:
                yield fd
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        with self._threads:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _locked(self, deadline: float) -> int:
        poll_s = _FIRST_POLL_S
        while True:
            if self._fd < 0:
                self._fd = os.open(self._path, _FLAGS, FILE_MODE)
            if try_lock(self._fd):
                if is_the_file(self._fd, self._path):
                    return self._fd
                self._close()
            elif time.monotonic() > deadline:
                raise _timed_out(self._path)
            else:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LAST_POLL_S)


def try_lock(fd: int) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_the_file(fd: int, path: str) -> bool:
    """Whether ``path`` still names the file that ``fd`` has open."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _timed_out(path: str) -> OSError:
    return OSError(errno.ETIMEDOUT, "another process does not let go of the lock", path)
