"""Which rows of a plan can be carried out at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moonstep.wire import BLOCK, GROUP, SLOT

if TYPE_CHECKING:
    from moonstep.wire import Rows


class BadRow(RuntimeError):
    """A row names a group, block or slot that is not there. Nothing has been copied."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What there is to copy between. Block 0 is the engine's null block and never holds anything
    (vLLM 0.32.0, ``BlockPool.null_block``), so no row may name it."""

    groups: int
    blocks: int
    slots: int

    def first_bad_row(self, rows: Rows) -> int | None:
        """The first row that names something that is not there.

        >>> rows = np.array([[0, 7, 3, 1], [0, 8, 3, 1]], dtype=np.int32)
        >>> Bounds(groups=1, blocks=8, slots=4).first_bad_row(rows)
        1
        """
        group, block, slot = rows[:, GROUP], rows[:, BLOCK], rows[:, SLOT]
        good = (group >= 0) & (group < self.groups) & (block > 0) & (block < self.blocks)
        bad = np.flatnonzero(~(good & (slot >= 0) & (slot < self.slots)))
        return int(bad[0]) if len(bad) else None

    def check(self, rows: Rows) -> None:
        """Raise ``BadRow`` for the first bad row."""
        bad = self.first_bad_row(rows)
        if bad is not None:
            raise self.bad_row(rows, bad)

    def bad_row(self, rows: Rows, row: int) -> BadRow:
        group, block, slot = (int(rows[row, column]) for column in (GROUP, BLOCK, SLOT))
        return BadRow(
            f"row {row} names group {group}, block {block}, slot {slot}; there are {self.groups} "
            f"groups, blocks 1 to {self.blocks - 1} and {self.slots} slots"
        )
