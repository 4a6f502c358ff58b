"""Restores: rows for the promises of a step, and large ones in slices over several steps.

A small promise is kept within the step that admits its request. A large one is taken as the
engine's asynchronous load: the engine holds the blocks until it is told that the load has ended,
and each step copies a slice, so that no running request waits for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.scheduler.index import HostIndex, Placement
from moonstep.scheduler.policies import Place
from moonstep.scheduler.witness import BlockKey, Witness, block_key
from moonstep.wire import ReqMeta

Row = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Restore:
    """One promised block: from which slot into which of the request's own blocks."""

    placement: Placement
    block: int
    place: Place
    nbytes: int

    @property
    def row(self) -> Row:
        return (self.placement.group, self.block, self.placement.slot, self.placement.generation)

    @property
    def key(self) -> BlockKey:
        return block_key(self.placement.name, self.placement.group)


@dataclass(slots=True)
class _Load:
    request_id: str
    restores: Sequence[Restore]
    done: int = 0
    outdated: bool = False
    """The caches were reset meanwhile: the promise is kept, but vouches for nothing."""

    @property
    def slots(self) -> list[int]:
        return [restore.placement.slot for restore in self.restores]


class LoadQueue:
    """Restores that are still owed. Scheduler thread only.

    A queued load pins its slots until its last slice is planned or its request has ended; either
    way the engine is told once that it is over.
    """

    def __init__(self, index: HostIndex, witness: Witness) -> None:
        self._index = index
        self._witness = witness
        self._loads: dict[str, _Load] = {}  # Invariant: oldest first
        self._rows: list[Row] = []
        self._of: list[ReqMeta] = []
        self._received: list[str] = []

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._loads

    def restore_now(self, request_id: str, restores: Sequence[Restore]) -> None:
        """Copy all of it in the step that is being built."""
        self._plan(request_id, restores, vouch=True)

    def enqueue(self, request_id: str, restores: Sequence[Restore]) -> None:
        """Owe the request these blocks, to be copied in slices from this step on."""
        load = _Load(request_id, restores)
        self._index.pin(load.slots)
        self._loads[request_id] = load

    def cancel(self, request_id: str) -> bool:
        """The request has ended. What is left of its load is dropped, and the engine is told."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return False
        self._finish(load)
        return True

    def advance(self, slice_bytes: int) -> None:
        """Plan the next slice, oldest load first; at least one block, however small the slice."""
        left_bytes = slice_bytes
        for load in list(self._loads.values()):
            start = load.done
            while load.done < len(load.restores) and (left_bytes > 0 or load.done == start):
                left_bytes -= load.restores[load.done].nbytes
                load.done += 1
            self._plan(load.request_id, load.restores[start : load.done], vouch=not load.outdated)
            if load.done == len(load.restores):
                del self._loads[load.request_id]
                self._finish(load)
            if left_bytes <= 0:
                return

    def outdate(self) -> None:
        """The caches are reset: what is still owed is copied, but counts as computed no more."""
        for load in self._loads.values():
            load.outdated = True

    def take(self) -> tuple[list[Row], tuple[ReqMeta, ...], tuple[str, ...]]:
        """Rows, whose they are, and ended loads, planned since the last call."""
        taken = self._rows, tuple(self._of), tuple(self._received)
        self._rows, self._of, self._received = [], [], []
        return taken

    def _plan(self, request_id: str, restores: Sequence[Restore], *, vouch: bool) -> None:
        start = len(self._rows)
        for restore in restores:
            self._rows.append(restore.row)
            if vouch:
                self._witness.saw_computed(restore.block, restore.key, restore.place)
                self._index.residency.note(restore.placement.slot, restore.block)
        self._of.append(ReqMeta(request_id, start, len(self._rows)))

    def _finish(self, load: _Load) -> None:
        self._index.unpin(load.slots)
        self._received.append(load.request_id)
