"""An engine's KV memory in numpy, and a worker on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from moonstep.config import Settings
from moonstep.wire import ROW_COLUMNS, Rows
from moonstep.worker.device import CpuDevice, DeviceFactory
from moonstep.worker.pieces import Piece, slot_bytes
from moonstep.worker.worker import MooncakeStoreWorker

Bytes = npt.NDArray[np.uint8]

BLOCKS = 12
SLOTS = 10


@dataclass(frozen=True)
class KvMemory:
    """Blocks of random bytes. ``layers[g]`` are the arrays of group ``g``, each ``[block, byte]``.

    The arrays may be strided, with bytes between the blocks that belong to no block.
    """

    buffer: Bytes
    layers: tuple[tuple[Bytes, ...], ...]

    @property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        groups = []
        for arrays in self.layers:
            offset, pieces = 0, []
            for array in arrays:
                nbytes = array.shape[1]
                pieces.append(Piece(array.ctypes.data, array.strides[0], nbytes, offset))
                offset += nbytes
            groups.append(tuple(pieces))
        return tuple(groups)

    def block(self, group: int, block: int) -> bytes:
        return b"".join(array[block].tobytes() for array in self.layers[group])

    def write_block(self, group: int, block: int, content: bytes) -> None:
        for array in self.layers[group]:
            nbytes = array.shape[1]
            array[block] = np.frombuffer(content[:nbytes], np.uint8)
            content = content[nbytes:]


def kv_memory(
    piece_bytes: Sequence[Sequence[int]] = ((100, 24, 64), (40,)), gap_bytes: int = 8, seed: int = 0
) -> KvMemory:
    """Memory for groups whose blocks have pieces of these sizes, one layer after the other.

    The first one starts on a cache line, as an engine's memory does.
    """
    total = sum(BLOCKS * (nbytes + gap_bytes) for group in piece_bytes for nbytes in group)
    unaligned = np.empty(total + 64, np.uint8)
    start = -int(unaligned.ctypes.data) % 64
    buffer = unaligned[start : start + total]
    buffer[:] = np.random.default_rng(seed).integers(0, 256, total, dtype=np.uint8)
    groups, start = [], 0
    for group in piece_bytes:
        arrays = []
        for nbytes in group:
            stop = start + BLOCKS * (nbytes + gap_bytes)
            arrays.append(buffer[start:stop].reshape(BLOCKS, -1)[:, :nbytes])
            start = stop
        groups.append(tuple(arrays))
    return KvMemory(buffer, tuple(groups))


def as_rows(rows: Sequence[tuple[int, int, int, int]]) -> Rows:
    """Rows of ``(group, block, slot, generation)``."""
    return np.array(rows, dtype=np.int32).reshape(-1, ROW_COLUMNS)


WorkerOn = Callable[..., MooncakeStoreWorker]


@pytest.fixture
def worker_on() -> Iterator[WorkerOn]:
    """Build workers with ``SLOTS`` slots; they are shut down at the test's end."""
    workers = []

    def build(memory: KvMemory, device: DeviceFactory = CpuDevice) -> MooncakeStoreWorker:
        settings = Settings(host_cache_bytes=SLOTS * slot_bytes(memory.pieces))
        workers.append(MooncakeStoreWorker(settings, 0, 1, BLOCKS, memory.pieces, device))
        return workers[-1]

    yield build
    for worker in workers:
        worker.shutdown()
