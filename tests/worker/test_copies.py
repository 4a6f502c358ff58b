"""The compiled loop: bit for bit, never outside what a row names, and outside the GIL."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.wire import NO_ROWS
from moonstep.worker.arena import Arena
from moonstep.worker.copies import Copier, compiled_loop, copy_table
from moonstep.worker.pieces import Piece, slot_bytes
from moonstep.worker.rows import BadRow, Bounds
from tests.worker.conftest import BLOCKS, SLOTS, KvMemory, as_rows, kv_memory

PIECE_BYTES = st.integers(1, 200) | st.sampled_from([4095, 4096, 4608, 4672, 8192 + 63, 24 << 10])
SIZES = st.lists(st.lists(PIECE_BYTES, min_size=1, max_size=5), min_size=1, max_size=3)


def copier_on(memory: KvMemory) -> tuple[Copier, Arena]:
    arena = Arena(SLOTS, slot_bytes(memory.pieces), fault_in=False)
    return Copier(arena, memory.pieces, BLOCKS), arena


@given(data=st.data(), sizes=SIZES, gap_bytes=st.sampled_from([0, 1, 8, 64]))
@settings(max_examples=60, deadline=None)
def test_blocks_come_back_bit_for_bit_in_other_blocks(
    data: st.DataObject, sizes: list[list[int]], gap_bytes: int
) -> None:
    memory = kv_memory(sizes, gap_bytes)
    copier, _ = copier_on(memory)
    group = data.draw(st.integers(0, len(sizes) - 1))
    count = data.draw(st.integers(1, SLOTS))
    sources, targets, slots = (
        data.draw(st.permutations(range(first, stop)))[:count]
        for first, stop in ((1, BLOCKS), (1, BLOCKS), (0, SLOTS))
    )
    expected = memory.buffer.copy()
    want = KvMemory(expected, _rebased(memory, expected))
    for source, target in zip(sources, targets, strict=True):
        want.write_block(group, target, memory.block(group, source))

    copier.blocks_to_slots(_rows(group, sources, slots))
    copier.slots_to_blocks(_rows(group, targets, slots))

    assert np.array_equal(memory.buffer, expected)


@pytest.mark.parametrize("offset", [0, 8, 63])
@pytest.mark.parametrize("nbytes", [4095, 4096, 4096 + 511, 4096 + 512, 24 << 10, (24 << 10) + 1])
def test_a_large_piece_is_copied_whole_and_nothing_beside_it(nbytes: int, offset: int) -> None:
    """With and without alignment to a cache line: streamed, by memcpy, and what is left over."""
    rng = np.random.default_rng(nbytes + offset)
    kv = rng.integers(0, 256, 2 * (nbytes + 256), dtype=np.uint8)
    start = -int(kv.ctypes.data) % 64 + offset
    arena = Arena(2, nbytes + 128, fault_in=False)
    piece = Piece(int(kv.ctypes.data) + start, nbytes + 64, nbytes, offset)
    copier = Copier(arena, [[piece]], 2)
    copier.blocks_to_slots(as_rows([(0, 1, 0, 1)]))
    source = slice(start + nbytes + 64, start + nbytes + 64 + nbytes)
    assert np.array_equal(arena.slot(0)[offset : offset + nbytes], kv[source])
    assert not arena.slot(0)[:offset].any()
    assert not arena.slot(0)[offset + nbytes :].any()
    expected = kv.copy()
    kv[source] = 0
    copier.slots_to_blocks(as_rows([(0, 1, 0, 1)]))
    assert np.array_equal(kv, expected)


@given(rows=st.lists(st.tuples(*[st.integers(-2, 13)] * 4), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_one_bad_row_and_nothing_is_copied(rows: list[tuple[int, int, int, int]]) -> None:
    memory = kv_memory()
    copier, arena = copier_on(memory)
    blocks_before, slots_before = memory.buffer.copy(), arena.memory.copy()
    bad = Bounds(len(memory.pieces), BLOCKS, SLOTS).first_bad_row(as_rows(rows))
    if bad is None:
        copier.blocks_to_slots(as_rows(rows))
        return
    for copy in (copier.blocks_to_slots, copier.slots_to_blocks):
        with pytest.raises(BadRow, match=f"row {bad} "):
            copy(as_rows(rows))
    assert np.array_equal(memory.buffer, blocks_before)
    assert np.array_equal(arena.memory, slots_before)


@pytest.mark.parametrize("block", [0, -1, BLOCKS, 2**31 - 1])
def test_a_block_that_is_not_there_is_refused(block: int) -> None:
    copier, _ = copier_on(kv_memory())
    with pytest.raises(BadRow, match=f"block {block}, slot 3"):
        copier.slots_to_blocks(as_rows([(0, block, 3, 1)]))


def test_no_rows_is_nothing_to_do() -> None:
    copier, _ = copier_on(kv_memory())
    copier.blocks_to_slots(NO_ROWS)


@pytest.mark.parametrize("form", ["read-only", "strided", "int64"])
def test_rows_of_any_form_are_taken(form: str) -> None:
    memory = kv_memory()
    copier, arena = copier_on(memory)
    rows = as_rows([(0, 3, 5, 1), (0, 4, 6, 1)])
    if form == "read-only":
        rows.flags.writeable = False
    elif form == "strided":
        rows = np.repeat(rows, 2, axis=1)[:, ::2]
    else:
        rows = rows.astype(np.int64)
    copier.blocks_to_slots(rows)
    assert arena.slot(6).tobytes().startswith(memory.block(0, 4))


def test_the_loop_is_compiled_once_for_all_calls() -> None:
    memory = kv_memory()
    copier, _ = copier_on(memory)
    copier.blocks_to_slots(as_rows([(0, 3, 5, 1)]))
    assert len(compiled_loop().signatures) == 1  # type: ignore[attr-defined]


def test_other_threads_run_while_the_loop_copies() -> None:
    """Progress is counted: a thread that needs the GIL moves on in the midst of a copy."""
    nbytes = 64 << 20
    source = np.ones(2 * nbytes, np.uint8)
    arena = Arena(1, nbytes)
    arena.wait_until_faulted_in(60)
    table = copy_table([[Piece(source.ctypes.data, nbytes, nbytes, 0)]])
    loop, rows = compiled_loop(), as_rows([(0, 1, 0, 1)])

    def outside_the_gil() -> None:
        loop(rows, table.starts, table.pieces, 2, arena.address, 1, nbytes, True)

    holding_libc = ctypes.PyDLL(None)
    holding_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def inside_the_gil() -> None:
        holding_libc.memcpy(arena.address, source.ctypes.data + nbytes, nbytes)

    assert any(_steps_of_another_thread(outside_the_gil) for _ in range(50))
    assert not any(_steps_of_another_thread(inside_the_gil) for _ in range(5))


def _steps_of_another_thread(call: Callable[[], None]) -> int:
    """How often a thread that gives the GIL up at each step got it back during ``call``.

    With a switch interval of hours only the call itself can let the other thread in.
    """
    count, stop, started = 0, False, threading.Event()

    def step() -> None:
        nonlocal count
        while not stop:
            count += 1
            started.set()
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=step)
    thread.start()
    try:
        started.wait(30)
        sys.setswitchinterval(3600)
        # Whoever waits for the GIL goes by the interval it found when it began to wait: let the
        # other thread begin anew.
        known = count
        while count < known + 2:
            time.sleep(0)
        before = count
        call()
        return count - before
    finally:
        stop = True
        sys.setswitchinterval(interval)
        thread.join()


def _rows(group: int, blocks: list[int], slots: list[int]) -> np.ndarray:
    return as_rows([(group, b, s, 1) for b, s in zip(blocks, slots, strict=True)])


def _rebased(memory: KvMemory, buffer: np.ndarray) -> tuple[tuple[np.ndarray, ...], ...]:
    """The layers of a memory, over a copy of its buffer."""
    return tuple(
        tuple(
            np.ndarray(
                layer.shape,
                np.uint8,
                buffer,
                layer.ctypes.data - memory.buffer.ctypes.data,
                layer.strides,
            )
            for layer in layers
        )
        for layers in memory.layers
    )
