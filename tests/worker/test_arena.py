"""Host memory: faulted in behind the start, stopped at the end, and no larger than it says."""

from __future__ import annotations

import ctypes
import logging
import mmap
import subprocess
import sys

import numpy as np
import pytest

from moonstep.worker import arena as arena_module
from moonstep.worker.arena import EMPTY, Arena

_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def resident_bytes(arena: Arena) -> int:
    """Bytes of the arena's whole pages that are in memory, as the kernel says."""
    pages = -(-arena.nbytes // mmap.PAGESIZE)
    resident = np.zeros(pages, np.uint8)
    assert _libc.mincore(arena.address, arena.nbytes, resident.ctypes.data) == 0
    return int((resident & 1).sum()) * mmap.PAGESIZE


def test_all_of_it_is_faulted_in_behind_the_start_and_what_was_written_stays() -> None:
    arena = Arena(slots=1000, slot_bytes=64 << 10)
    arena.slot(999)[:] = 7
    assert arena.wait_until_faulted_in(60)
    assert resident_bytes(arena) >= arena.nbytes
    assert (arena.slot(999) == 7).all()
    assert not arena.slot(998).any()
    arena.close()


def test_slots_are_page_aligned_empty_and_apart() -> None:
    arena = Arena(slots=4, slot_bytes=192, fault_in=False)
    assert arena.address % mmap.PAGESIZE == 0
    assert (arena.generation == EMPTY).all()
    for slot in range(4):
        arena.slot(slot)[:] = slot
    assert [set(arena.slot(slot).tolist()) for slot in range(4)] == [{0}, {1}, {2}, {3}]


def test_closing_stops_the_faulting_within_a_chunk() -> None:
    """Closed at once, long before so much memory can have been faulted in."""
    arena = Arena(slots=1 << 10, slot_bytes=4 << 20)
    arena.close()
    assert arena.wait_until_faulted_in(0)
    assert resident_bytes(arena) < arena.nbytes


def test_more_memory_than_the_system_gives_is_named() -> None:
    with pytest.raises(MemoryError, match="1099511627776 slots of 1048576 bytes"):
        Arena(slots=1 << 40, slot_bytes=1 << 20)


def test_a_kernel_that_cannot_fault_in_ahead_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "MADV_POPULATE_WRITE", 9999)
    with caplog.at_level(logging.INFO):
        arena = Arena(slots=10, slot_bytes=4096)
        assert arena.wait_until_faulted_in(60)
    assert "not faulted in ahead of use beyond byte 0" in caplog.text
    arena.slot(9)[:] = 1
    assert arena.slot(9).all()


def test_an_arena_without_slots_holds_nothing() -> None:
    arena = Arena(slots=0, slot_bytes=4096)
    assert arena.wait_until_faulted_in(60)
    assert (arena.nbytes, len(arena.memory), len(arena.generation)) == (0, 0, 0)
    arena.close()


MEASURE = """
import os, psutil, numba, numpy as np
from moonstep.config import Settings
from moonstep.worker.pieces import Piece
HOST_CACHE, PIECE, BLOCKS = 256 << 20, 24 << 10, 40
kv = np.ones((30, BLOCKS, PIECE), np.uint8)
rss = psutil.Process().memory_info
before = rss().rss
from moonstep.wire import StepPlan
from moonstep.worker.worker import MooncakeStoreWorker
pieces = [[Piece(kv[l].ctypes.data, PIECE, PIECE, l * PIECE) for l in range(30)]]
worker = MooncakeStoreWorker(Settings(host_cache_bytes=HOST_CACHE), 0, 1, BLOCKS, pieces)
assert worker.arena.wait_until_faulted_in(60)
rows = np.array([(0, block, block, 1) for block in range(1, BLOCKS)], np.int32)
worker.capture(StepPlan(0, captures=rows))
worker.restore(StepPlan(1, restores=rows))
print(rss().rss - before - HOST_CACHE)
"""


def test_a_worker_takes_little_more_than_its_host_cache() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, timeout=120
    )
    assert -(4 << 20) < int(done.stdout) < 64 << 20
