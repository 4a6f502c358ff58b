"""The copy loop: blocks to slots and back, one compiled call a step, outside the GIL.

Pieces are written with stores that go past the caches. A store through the caches first reads the
line that it is about to overwrite whole, which is a third of all the traffic; and neither what a
capture wrote nor most of a large restore is read again soon. It makes the loop faster than
``memcpy``, which does the same only in calls of some hundred MiB (``moonstep bench copy``).

Two lines at a time, from the first to the last. More places side by side were faster on one
processor, and on another three times slower whenever the two addresses are nearly equal in their
last twelve bits: a load then waits for a store to another place that only looks like its own.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from moonstep.wire import BLOCK, GROUP, NO_ROWS, SLOT, Rows
from moonstep.worker.rows import Bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonstep.worker.arena import Arena
    from moonstep.worker.pieces import Piece

logger = logging.getLogger(__name__)

# Columns of the table of pieces.
_ADDRESS: Final = 0
_STRIDE: Final = 1
_NBYTES: Final = 2
_OFFSET: Final = 3

_ALL_GOOD: Final = -1

LINE_BYTES: Final = 64
STREAM_STEP_BYTES: Final = 2 * LINE_BYTES
STREAM_FROM_BYTES: Final = 4096
"""Smaller pieces gain nothing from being streamed."""

_memcpy = types.ExternalFunction("memcpy", types.voidptr(types.intp, types.intp, types.intp))


class CopyTable(NamedTuple):
    """The pieces of all groups as arrays: group ``g`` has ``pieces[starts[g]:starts[g + 1]]``."""

    starts: npt.NDArray[np.int64]
    pieces: npt.NDArray[np.int64]


def copy_table(groups: Sequence[Sequence[Piece]]) -> CopyTable:
    """The groups' pieces in the form the compiled loop reads."""
    starts = np.cumsum([0] + [len(pieces) for pieces in groups], dtype=np.int64)
    flat = [
        (piece.address, piece.block_stride_bytes, piece.nbytes, piece.slot_offset)
        for pieces in groups
        for piece in pieces
    ]
    return CopyTable(starts, np.array(flat, dtype=np.int64).reshape(len(flat), 4))


class Copier:
    """Copies between one engine's KV memory and one arena. For memory that the CPU addresses.

    Built once: the loop is compiled, or loaded from numba's cache on disk, and run on no rows, so
    that no step waits for that. The memory behind the pieces' addresses must outlive the copier.
    """

    def __init__(self, arena: Arena, groups: Sequence[Sequence[Piece]], block_count: int) -> None:
        self._arena = arena
        self._table = copy_table(groups)
        self._bounds = Bounds(groups=len(groups), blocks=block_count, slots=arena.slots)
        self._loop = compiled_loop()
        self.blocks_to_slots(NO_ROWS)
        self.slots_to_blocks(NO_ROWS)

    def blocks_to_slots(self, rows: Rows) -> None:
        """Copy each row's block to its slot. Raises ``BadRow`` before the first byte."""
        self._copy(rows, to_slots=True)

    def slots_to_blocks(self, rows: Rows) -> None:
        """Copy each row's slot to its block. Raises ``BadRow`` before the first byte."""
        self._copy(rows, to_slots=False)

    def _copy(self, rows: Rows, *, to_slots: bool) -> None:
        arena = self._arena
        bad = self._loop(
            np.ascontiguousarray(rows, dtype=np.int32),
            self._table.starts,
            self._table.pieces,
            self._bounds.blocks,
            arena.address,
            arena.slots,
            arena.slot_bytes,
            to_slots,
        )
        if bad != _ALL_GOOD:
            raise self._bounds.bad_row(rows, bad)


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(_typing: Any, _target: Any, _source: Any) -> Any:
    """Copy ``LINE_BYTES`` to a line-aligned address, past the caches."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()
        target, source = (builder.inttoptr(address, line) for address in arguments)
        store = builder.store(builder.load(source, align=1), target, align=LINE_BYTES)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(_typing: Any) -> Any:
    """Order all stores before it, streamed ones too, before whatever follows on any thread."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit  # type: ignore[untyped-decorator]
def _copy_piece(target: int, source: int, nbytes: int) -> None:
    """Copy one piece: streamed where that is possible and pays, else by ``memcpy``."""
    done = 0
    if nbytes >= STREAM_FROM_BYTES and target % LINE_BYTES == 0:
        done = nbytes // STREAM_STEP_BYTES * STREAM_STEP_BYTES
        for at in range(0, done, STREAM_STEP_BYTES):
            _stream_line(target + at, source + at)
            _stream_line(target + at + LINE_BYTES, source + at + LINE_BYTES)
    if done < nbytes:
        _memcpy(target + done, source + done, nbytes - done)


def _copy_rows(
    rows: Rows,
    starts: npt.NDArray[np.int64],
    pieces: npt.NDArray[np.int64],
    block_count: int,
    arena_address: int,
    slot_count: int,
    slot_bytes: int,
    to_slots: bool,
) -> int:
    """Check every row, then copy every row's pieces. Returns the first bad row, or -1.

    Bad means what ``Bounds.first_bad_row`` means. Piece by piece, since the blocks of one layer lie
    together in the engine's memory; that is a tenth faster than block by block.
    """
    group_count = starts.shape[0] - 1
    for row in range(rows.shape[0]):
        if not (
            0 <= rows[row, GROUP] < group_count
            and 0 < rows[row, BLOCK] < block_count
            and 0 <= rows[row, SLOT] < slot_count
        ):
            return row
    for group in range(group_count):
        for piece in range(starts[group], starts[group + 1]):
            for row in range(rows.shape[0]):
                if rows[row, GROUP] != group:
                    continue
                block, slot = np.int64(rows[row, BLOCK]), np.int64(rows[row, SLOT])
                in_block = pieces[piece, _ADDRESS] + block * pieces[piece, _STRIDE]
                in_slot = arena_address + slot * slot_bytes + pieces[piece, _OFFSET]
                if to_slots:
                    _copy_piece(in_slot, in_block, pieces[piece, _NBYTES])
                else:
                    _copy_piece(in_block, in_slot, pieces[piece, _NBYTES])
    _fence()
    return _ALL_GOOD


# Read-only rows are accepted, since a plan may lie in a buffer that its reader cannot write.
_LOOP_SIGNATURE: Final = types.int64(
    types.Array(types.int32, 2, "C", readonly=True),
    types.Array(types.int64, 1, "C", readonly=True),
    types.Array(types.int64, 2, "C", readonly=True),
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    types.boolean,
)


@functools.cache
def compiled_loop() -> Callable[..., int]:
    """``_copy_rows`` as machine code that runs without the GIL.

    Kept on disk beside this file or in numba's cache directory; where neither can be written the
    loop is compiled at each start.
    """
    compiler = functools.partial(numba.njit, [_LOOP_SIGNATURE], nogil=True)
    try:
        loop: Callable[..., int] = compiler(cache=True)(_copy_rows)
    except RuntimeError:
        logger.info("the copy loop is compiled anew: numba finds no place for its cache")
        loop = compiler(cache=False)(_copy_rows)
    return loop
