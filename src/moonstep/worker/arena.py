"""A worker's host memory: equal slots in one mapping, and the generation of each."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

EMPTY: Final = -1
"""The generation of a slot that holds nothing anybody may ask for."""

FAULT_CHUNK_BYTES: Final = 4 << 20
"""Small, since whoever maps memory meanwhile waits until the kernel is through with a chunk."""
MADV_POPULATE_WRITE: Final = 23
"""Fault pages in for writing and leave what they hold alone (Linux 5.14 and later)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """``slots`` slots of ``slot_bytes`` bytes each, page-aligned, private to this process.

    The memory is faulted in by a daemon thread, so that building an arena takes no time however
    large it is; a capture into memory that is not there yet faults it in itself. Bytes and
    generations belong to the engine's worker thread, which alone calls ``close``. Raises
    ``MemoryError`` when the system does not give the address space.
    """

    def __init__(self, slots: int, slot_bytes: int, *, fault_in: bool = True) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._mapping = _map(slots, slot_bytes)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(
            self._mapping, np.uint8, slots * slot_bytes
        )
        self.generation: npt.NDArray[np.int32] = np.full(slots, EMPTY, dtype=np.int32)
        self._closing = threading.Event()
        self._fault_thread = threading.Thread(
            target=self._fault_in, name="moonstep-arena", daemon=True
        )
        if fault_in:
            self._fault_thread.start()

    @property
    def address(self) -> int:
        """Where slot 0 starts."""
        return int(self.memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def slot(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of one slot, as a view."""
        start = slot * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def wait_until_faulted_in(self, timeout_s: float) -> bool:
        """Whether the background thread has ended, or ends within ``timeout_s``."""
        if self._fault_thread.is_alive():
            self._fault_thread.join(timeout_s)
        return not self._fault_thread.is_alive()

    def close(self) -> None:
        """Stop faulting memory in, within one chunk. The memory lives until the last view goes."""
        self._closing.set()
        if self._fault_thread.is_alive():
            self._fault_thread.join()

    def _fault_in(self) -> None:
        """Ask the kernel for the pages, chunk by chunk; ctypes lets the GIL go in each call."""
        for start in range(0, self.nbytes, FAULT_CHUNK_BYTES):
            if self._closing.is_set():
                return
            nbytes = min(FAULT_CHUNK_BYTES, self.nbytes - start)
            if _libc.madvise(self.address + start, nbytes, MADV_POPULATE_WRITE) != 0:
                # An old kernel, or no memory left: first touch faults the rest in, or fails there.
                logger.info(
                    "host cache is not faulted in ahead of use beyond byte %d: errno %d",
                    start,
                    ctypes.get_errno(),
                )
                return


def _map(slots: int, slot_bytes: int) -> mmap.mmap:
    """Anonymous private memory for the slots. An arena of no slots gets a page that nothing uses.

    Huge pages fault in several times faster and miss the TLB less; they are a wish, not a need.
    """
    nbytes = max(slots * slot_bytes, mmap.PAGESIZE)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"the system gives no memory for {slots} slots of {slot_bytes} bytes: {error}"
        ) from error
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        logger.debug("no huge pages for the host cache", exc_info=True)
    return mapping
