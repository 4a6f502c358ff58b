"""The seam to the device: what a worker asks of the memory its engine computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from moonstep.worker.copies import Copier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonstep.wire import Rows
    from moonstep.worker.arena import Arena
    from moonstep.worker.pieces import Piece


class Ticket(Protocol):
    """A capture under way."""

    def ended(self) -> bool:
        """Whether every byte of it is in its slot. Never blocks."""
        ...


class Device(Protocol):
    """The two verbs, called on the engine's worker thread in the order of its steps.

    Both check every row first and raise ``BadRow`` before the first byte. A restore is ordered
    before all work of the step that follows it; a capture after all work that precedes it and
    before all that follows.
    """

    def restore(self, rows: Rows) -> None:
        """Slots to blocks."""
        ...

    def capture(self, rows: Rows) -> Ticket:
        """Blocks to slots."""
        ...

    def close(self) -> None:
        """Wait for what is under way and let the arena's memory go."""
        ...


class DeviceFactory(Protocol):
    """How a worker gets its device, once it has an arena."""

    def __call__(
        self, arena: Arena, groups: Sequence[Sequence[Piece]], block_count: int
    ) -> Device: ...


class _Ended:
    """The ticket of a capture that was over when its call returned."""

    def ended(self) -> bool:
        return True


ENDED: Final = _Ended()


class CpuDevice:
    """KV memory that the CPU addresses: each verb is one call into the compiled loop."""

    def __init__(self, arena: Arena, groups: Sequence[Sequence[Piece]], block_count: int) -> None:
        self._copier = Copier(arena, groups, block_count)

    def restore(self, rows: Rows) -> None:
        self._copier.slots_to_blocks(rows)

    def capture(self, rows: Rows) -> Ticket:
        self._copier.blocks_to_slots(rows)
        return ENDED

    def close(self) -> None:
        """Nothing is ever under way here."""
