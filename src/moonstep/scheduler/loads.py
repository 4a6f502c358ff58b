"""Restores: rows for the promises of a step, and large ones in slices over several steps.

A small promise is kept within the step that admits its request. A large one is taken as the
engine's asynchronous load: the engine holds the blocks until it is told that the load has ended,
and each step copies a slice, so that no running request waits for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from moonstep.config import Settings
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.witness import Witness
from moonstep.wire import ReqMeta, Rows, join_rows, make_rows

_RESTING_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Restore:
    """Promised blocks of one group: from which slots, at which generations, into which blocks."""

    columns: Columns
    slots: list[int]
    generations: npt.NDArray[np.int32]
    block_bytes: int

    def rows(self, start: int, stop: int) -> Rows:
        return make_rows(
            self.columns.group,
            self.columns.blocks[start:stop],
            self.slots[start:stop],
            self.generations[start:stop],
        )


@dataclass(slots=True)
class _Load:
    request_id: str
    restores: Sequence[Restore]
    group: int = 0
    block: int = 0
    """How far it has come: blocks before ``restores[group]``'s row ``block`` are planned."""
    outdated: bool = False
    """The caches were reset meanwhile: the promise is kept, but vouches for nothing."""

    @property
    def is_over(self) -> bool:
        return self.group == len(self.restores)

    @property
    def slots(self) -> list[int]:
        return [slot for restore in self.restores for slot in restore.slots]


class LoadQueue:
    """Restores that are still owed. Scheduler thread only.

    A queued load pins its slots until its last slice is planned or its request has ended; either
    way the engine is told once that it is over. ``rests``: slots are kept from other writers for
    some steps after their restore.
    """

    def __init__(self, index: HostIndex, witness: Witness, *, rests: bool = False) -> None:
        self._index = index
        self._witness = witness
        self._rests = rests
        self._loads: dict[str, _Load] = {}  # Invariant: oldest first
        self._rows: list[Rows] = []
        self._row_count = 0
        self._of: list[ReqMeta] = []
        self._received: list[str] = []
        # The slots of the last steps' restores, oldest first, each pinned once. A background writer
        # does not wait for a step, and a device may still copy (async scheduling is one ahead).
        self._resting: deque[list[int]] = deque([] for _ in range(_RESTING_STEPS))

    def __len__(self) -> int:
        return len(self._loads)

    def __bool__(self) -> bool:
        return bool(self._loads)

    @property
    def has_plans(self) -> bool:
        """Whether ``take`` has anything to give."""
        return bool(self._of or self._received)

    def restore_now(self, request_id: str, restores: Sequence[Restore]) -> None:
        """Copy all of it in the step that is being built."""
        self._advance(_Load(request_id, restores), slice_bytes=None)

    def enqueue(self, request_id: str, restores: Sequence[Restore]) -> None:
        """Owe the request these blocks, to be copied in slices from this step on."""
        load = _Load(request_id, restores)
        self._index.pin(load.slots)
        self._loads[request_id] = load

    def cancel(self, request_id: str) -> None:
        """The request has ended. What is left of its load is dropped, and the engine is told."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._finish(load)

    def advance(self, slice_bytes: int) -> None:
        """Plan the next slice, oldest load first; at least one block, however small the slice."""
        for load in list(self._loads.values()):
            slice_bytes -= self._advance(load, slice_bytes)
            if load.is_over:
                del self._loads[load.request_id]
                self._finish(load)
            if slice_bytes <= 0:
                return

    def outdate(self) -> None:
        """The caches are reset: what is still owed is copied, but counts as computed no more."""
        for load in self._loads.values():
            load.outdated = True

    def end_step(self) -> None:
        """The step is built: slots that were restored two steps before may have other writers."""
        if self._rests:
            self._index.unpin(self._resting.popleft())
            self._resting.append([])

    @property
    def resting_slots(self) -> int:
        """Slots that no background writer may have yet."""
        return sum(map(len, self._resting))

    def take(self) -> tuple[Rows, tuple[ReqMeta, ...], tuple[str, ...]]:
        """Rows, whose they are, and ended loads, planned since the last call."""
        taken = join_rows(self._rows), tuple(self._of), tuple(self._received)
        self._rows, self._of, self._received, self._row_count = [], [], [], 0
        return taken

    def _advance(self, load: _Load, slice_bytes: int | None) -> int:
        """Plan rows of ``load`` up to ``slice_bytes``, at least one; answer with their bytes."""
        first_row, planned_bytes = self._row_count, 0
        while not load.is_over and (slice_bytes is None or planned_bytes < max(slice_bytes, 1)):
            restore = load.restores[load.group]
            count = len(restore.slots) - load.block
            if slice_bytes is not None:
                left_blocks = (slice_bytes - planned_bytes) // restore.block_bytes
                count = min(count, max(left_blocks, 1))
            self._plan(load, restore, count)
            planned_bytes += count * restore.block_bytes
        self._of.append(ReqMeta(load.request_id, first_row, self._row_count))
        return planned_bytes

    def _plan(self, load: _Load, restore: Restore, count: int) -> None:
        start, stop = load.block, load.block + count
        self._rows.append(restore.rows(start, stop))
        self._row_count += count
        if not load.outdated:
            part = restore.columns.part(start, stop)
            self._witness.saw_computed(part)
            self._index.residency.note(restore.slots[start:stop], part.blocks)
        if self._rests:
            self._index.pin(restore.slots[start:stop])
            self._resting[-1].extend(restore.slots[start:stop])
        load.block = stop
        if stop == len(restore.slots):
            load.group, load.block = load.group + 1, 0

    def _finish(self, load: _Load) -> None:
        self._index.unpin(load.slots)
        self._received.append(load.request_id)


def slice_bytes(settings: Settings, *, is_idle: bool) -> int:
    """How much a step copies of the loads that are owed; ``is_idle``: no request has a life.

    A step that computes nothing may yet be one in which requests decode (pipeline parallelism).
    """
    if is_idle:
        return max(settings.restore_slice_bytes, settings.idle_restore_bytes)
    return settings.restore_slice_bytes
