"""The CUDA side's logic on CPU tensors: which bytes go where, and when a capture counts.

The order of copies on a stream and the pinning of the arena need a device; nothing here shows them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonstep.wire import StepPlan
from moonstep.worker.arena import Arena
from moonstep.worker.cuda import PieceView, StridedDevice
from moonstep.worker.rows import BadRow
from tests.worker.conftest import BLOCKS, KvMemory, WorkerOn, as_rows, kv_memory


class HeldEvent:
    """An event of a stream that reaches it when the test says so."""

    def __init__(self) -> None:
        self.is_recorded = False
        self.is_reached = False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        return self.is_reached


def strided_device(arena: Arena, memory: KvMemory, events: list[HeldEvent]) -> StridedDevice:
    groups = [
        [
            PieceView(torch.from_numpy(layer), piece.slot_offset)
            for layer, piece in zip(layers, pieces, strict=True)
        ]
        for layers, pieces in zip(memory.layers, memory.pieces, strict=True)
    ]

    def new_event() -> HeldEvent:
        events.append(HeldEvent())
        return events[-1]

    slots = torch.from_numpy(arena.memory).view(arena.slots, arena.slot_bytes)
    return StridedDevice(slots, groups, BLOCKS, new_event)


def test_it_moves_the_bytes_that_the_compiled_loop_moves(worker_on: WorkerOn) -> None:
    here, there = kv_memory(), kv_memory()
    by_loop = worker_on(here)
    by_torch = worker_on(there, lambda arena, *_: strided_device(arena, there, []))
    rows = as_rows([(0, 3, 7, 1), (1, 4, 2, 1), (0, 5, 0, 1)])
    for worker in (by_loop, by_torch):
        worker.capture(StepPlan(0, captures=rows))
    assert np.array_equal(by_loop.arena.memory, by_torch.arena.memory)
    for worker in (by_loop, by_torch):
        worker.restore(StepPlan(1, restores=as_rows([(0, 9, 7, 1), (1, 9, 2, 1)])))
    assert np.array_equal(here.buffer, there.buffer)
    assert here.block(0, 9) == here.block(0, 3)


def test_a_capture_counts_once_the_event_behind_it_has_completed(worker_on: WorkerOn) -> None:
    memory, events = kv_memory(), list[HeldEvent]()
    worker = worker_on(memory, lambda arena, *_: strided_device(arena, memory, events))
    worker.report()
    worker.capture(StepPlan(0, captures=as_rows([(0, 3, 7, 1)])))
    assert worker.report() is None
    events[0].is_reached = True
    report = worker.report()
    assert report is not None
    assert report.by_rank[0].captured == (0,)


def test_one_bad_row_and_nothing_is_copied() -> None:
    memory, arena = kv_memory(), Arena(4, 192, fault_in=False)
    device = strided_device(arena, memory, [])
    before = memory.buffer.copy()
    for verb in (device.restore, device.capture):
        with pytest.raises(BadRow, match="row 1 names group 0, block 0, slot 3"):
            verb(as_rows([(0, 3, 1, 1), (0, 0, 3, 1)]))
    assert np.array_equal(memory.buffer, before)
    assert not arena.memory.any()
