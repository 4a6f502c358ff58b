"""Slots of the host cache: what may be done with them, and blocks that were given some."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from moonstep.scheduler.columns import NONE, Columns, Numbers, numbers
from moonstep.wire import Rows, make_rows

AT_ONCE: Final = 256
"""Blocks that a lookup asks about in one go."""


class SlotState(IntEnum):
    """What may be done with a slot."""

    FREE = 0
    PLANNED = 1
    WRITTEN = 2
    DOOMED = 3
    """Written and promised before a reset: never found again, free when its last pin goes."""


FREE: Final = int(SlotState.FREE)
PLANNED: Final = int(SlotState.PLANNED)
WRITTEN: Final = int(SlotState.WRITTEN)
"""The numbers themselves: an enum's member costs more than the comparison it stands in."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Blocks with the slots they are to be captured into.

    The generation tells this use of the slots from every other one.
    """

    columns: Columns
    slots: list[int]
    generation: int
    at: Numbers = field(default_factory=lambda: NONE, repr=False, compare=False)
    """The slots once more, as an array."""

    def __post_init__(self) -> None:
        if len(self.at) < len(self.slots):
            object.__setattr__(self, "at", numbers(self.slots))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def rows(self) -> Rows:
        return make_rows(self.columns.group, self.columns.blocks, self.at, self.generation)


@dataclass(slots=True)
class IndexCounts:
    """What the index has done since the start."""

    evicted: int = 0
    evicted_resident: int = 0
    """Of these, copies of what the engine still held."""
    refused: int = 0
    """Captures that found no slot to give them."""
