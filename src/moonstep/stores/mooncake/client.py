"""One client of Mooncake's package: set up, called from many threads, and ended without a wait.

Three things that the package does decide what this module looks like (found by running 0.3.13):

- a call on a client that was closed crashes the process, so the end waits for the calls under way
  and no call begins after it;
- setting up and closing hold the GIL, for half a minute or more when the master is stopped, so both
  are only done right after the master has answered;
- when the process ends, the package closes what is still open, and waits for a stopped master just
  as long. So a client that could not be closed is *left behind*: it is never destroyed, and the
  process ends without the package's last words.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from moonstep.stores.base import StoreUnwell
from moonstep.stores.mooncake.address import address_of
from moonstep.stores.mooncake.codes import code
from moonstep.stores.mooncake.master import answers, metadata_answers, route_to
from moonstep.stores.mooncake.options import DEFAULT_TENANT, MooncakeOptions

logger = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
"""How long a master may take to show that it runs, before a client is set up or closed."""


class SetUpRefused(StoreUnwell):
    """The master is there, and yet Mooncake makes no client: a setting does not fit the machine."""


class Client:
    """A client that is set up. ``registrations`` counts the regions registered with it."""

    def __init__(self, handle: Any, options: MooncakeOptions) -> None:
        self._handle = handle
        self._options = options
        self._changed = threading.Condition()
        self._calls = 0
        self._is_closing = False
        self.registrations = 0
        _unclosed[id(handle)] = handle

    @classmethod
    def connect(cls, package: ModuleType, options: MooncakeOptions) -> Client:
        """A client of the master, its segment mounted. Raises ``StoreUnwell`` when there is none.

        Blocks for the fraction of a second that it takes to map and register a segment over TCP,
        and longer over RDMA, where the memory is pinned.
        """
        if not answers(options.master, ANSWER_S):
            raise StoreUnwell(f"no master answers at {options.master}")
        if not metadata_answers(options.metadata, ANSWER_S):
            raise StoreUnwell(f"no metadata server answers at {options.metadata}")
        handle = package.MooncakeDistributedStore()
        tenant = {} if options.tenant == DEFAULT_TENANT else {"tenant_id": options.tenant}
        status = handle.setup(
            options.host or route_to(options.master),
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.device,
            str(options.master),
            **tenant,
        )
        if status != 0:
            raise SetUpRefused(
                f"Mooncake does not set up a client of {options.master}: {code(status).name}; with "
                "MC_LOG_LEVEL=INFO in the environment it writes to standard error why"
            )
        return cls(handle, options)

    @property
    def segment(self) -> str:
        """The name of this client's segment."""
        name: str = self._handle.get_hostname()
        return name

    @contextmanager
    def calling(self) -> Iterator[Any]:
        """The package's object, for one call. Raises ``StoreUnwell`` after ``close`` began."""
        with self._changed:
            if self._is_closing:
                raise StoreUnwell("the Mooncake store is closed")
            self._calls += 1
        try:
            yield self._handle
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def register(self, memory: memoryview) -> None:
        """Let spans lie in ``memory`` from now on. Raises ``StoreUnwell`` when it is refused."""
        with self.calling() as handle:
            status = handle.register_buffer(address_of(memory), memory.nbytes)
        if status != 0:
            raise StoreUnwell(
                f"moonstep: Mooncake cannot register {memory.nbytes} bytes of memory "
                f"({code(status).name}); over RDMA, memory has to be locked: see `ulimit -l`"
            )
        self.registrations += 1

    def close(self) -> None:
        """Let no call begin, wait for those under way, close. Returns when there is nothing left.

        Waits as long as the master keeps a call waiting. A master that does not answer is not told:
        it takes this client for dead by itself after a few seconds.
        """
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
            self._changed.wait_for(lambda: self._calls == 0)
        if not is_first:
            return
        if answers(self._options.master, ANSWER_S):
            self._handle.close()
            _unclosed.pop(id(self._handle), None)
        else:
            logger.info("Mooncake's master does not answer: its client is left behind")


_unclosed: Final[dict[int, Any]] = {}
"""Handles that must not be destroyed: that would close them, on whatever thread, with the GIL."""


def _leave_behind(handles: Sequence[Any]) -> None:
    """See to it that these are never destroyed and that the process ends without closing them."""
    if not handles:
        return
    for handle in handles:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
    # Handlers run last one first, so this comes before those of the package, with the exit status
    # that the process is about to have. Nothing but C may run then: Python has ended.
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc._exit, None)


atexit.register(lambda: _leave_behind(tuple(_unclosed.values())))
