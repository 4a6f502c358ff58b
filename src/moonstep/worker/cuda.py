"""The device side for CUDA: strided copies on the compute stream, between device and pinned memory.

This has not run on hardware yet. What it relies on, and what tests on CPU tensors cannot show:

- Both verbs are called on the engine's worker thread while the compute stream is torch's current
  stream, and put all their copies on it. So a restore is over before the kernels of the forward
  pass that is launched next, a capture sees what the forward pass before it wrote, and no later
  step overwrites a block that a capture still reads.
- A capture's event is recorded behind its copies, and a slot is acknowledged when the event has
  completed: its bytes are in host memory then, and not when the copies were launched.
- A slot is restored, or captured over, behind an earlier capture into it on the same stream.
- The arena is registered with CUDA when the device is built, because copies between the device and
  pageable memory are staged and hold the launching thread. Registering faults the arena in, so here
  a start does wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import torch

from moonstep.wire import BLOCK, GROUP, SLOT
from moonstep.worker.rows import Bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonstep.wire import Rows
    from moonstep.worker.arena import Arena
    from moonstep.worker.device import Ticket
    from moonstep.worker.pieces import Piece


class Event(Protocol):
    """``torch.cuda.Event``, as far as it is used."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PieceView:
    """One piece of all blocks: ``blocks[b]`` are its bytes in block ``b``, as uint8."""

    blocks: torch.Tensor
    slot_offset: int

    def within(self, slot: torch.Tensor) -> torch.Tensor:
        """Where this piece lies in a slot's bytes."""
        return slot[self.slot_offset : self.slot_offset + self.blocks.shape[1]]


@dataclass(frozen=True, slots=True)
class EventTicket:
    """Ended once the event behind the copies has completed."""

    event: Event

    def ended(self) -> bool:
        return self.event.query()


class StridedDevice:
    """The two verbs as one copy a row and piece, on torch's current stream.

    ``slots[s]`` are the bytes of slot ``s`` in host memory, ``groups[g]`` the pieces of a block of
    group ``g``.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        groups: Sequence[Sequence[PieceView]],
        block_count: int,
        new_event: Callable[[], Event],
    ) -> None:
        self._slots = slots
        self._groups = groups
        self._bounds = Bounds(groups=len(groups), blocks=block_count, slots=len(slots))
        self._new_event = new_event

    def restore(self, rows: Rows) -> None:
        self._bounds.check(rows)
        for row in rows.tolist():
            slot = self._slots[row[SLOT]]
            for piece in self._groups[row[GROUP]]:
                piece.blocks[row[BLOCK]].copy_(piece.within(slot), non_blocking=True)

    def capture(self, rows: Rows) -> Ticket:
        self._bounds.check(rows)
        for row in rows.tolist():
            slot = self._slots[row[SLOT]]
            for piece in self._groups[row[GROUP]]:
                piece.within(slot).copy_(piece.blocks[row[BLOCK]], non_blocking=True)
        event = self._new_event()
        event.record()
        return EventTicket(event)

    def close(self) -> None:
        """Nothing is held here: what is under way belongs to the stream."""


class CudaDevice(StridedDevice):
    """KV memory on a CUDA device, with the arena pinned: ``RuntimeError`` if CUDA refuses."""

    def __init__(self, arena: Arena, groups: Sequence[Sequence[Piece]], block_count: int) -> None:
        self._address = arena.address
        refusal = torch.cuda.cudart().cudaHostRegister(self._address, arena.nbytes, 0)
        if int(refusal) != 0:
            raise RuntimeError(
                f"CUDA does not pin the host cache of {arena.nbytes} bytes (error {int(refusal)})"
            )
        super().__init__(
            torch.from_numpy(arena.memory).view(arena.slots, arena.slot_bytes),
            [[_on_device(piece, block_count) for piece in pieces] for pieces in groups],
            block_count,
            torch.cuda.Event,
        )

    def close(self) -> None:
        """Wait for the copies under way and unpin the arena."""
        torch.cuda.current_stream().synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._address)


def _on_device(piece: Piece, block_count: int) -> PieceView:
    """Take the engine's memory over by its address, as a view that owns nothing."""
    memory = SimpleNamespace(
        __cuda_array_interface__={
            "data": (piece.address, False),
            "shape": (block_count, piece.nbytes),
            "strides": (piece.block_stride_bytes, 1),
            "typestr": "|u1",
            "version": 3,
        }
    )
    return PieceView(torch.as_tensor(memory), piece.slot_offset)
