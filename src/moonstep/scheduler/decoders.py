"""Lives that decode and that nobody has to look at before they end: what they get is noted apart.

Such a life gets a block every so many steps, and nothing is done with it but to remember it. Its
table, a list of its own behind three objects, would be touched for that in each of these steps.
Instead the blocks wait in one array for all of them, a line of the processor's cache for a life,
until somebody asks for the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from moonstep.scheduler.allocations import Grown
from moonstep.scheduler.columns import numbers
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.witness import NOBODY

_DEPTH: Final = 0
_SOURCE: Final = 1
_COUNT: Final = 2
_BLOCKS: Final = 3
_ROW: Final = 16
_ROOM: Final = _ROW - _BLOCKS


class Decoders:
    """Seats of lives with one group, by request id. Scheduler thread only."""

    def __init__(self) -> None:
        self.seat_of: dict[str, int] = {}
        # By seat: length of the table, its source, how many blocks wait, and these blocks.
        self._rows: npt.NDArray[np.int32] = np.zeros((0, _ROW), dtype=np.int32)
        self._tables: list[list[int]] = []
        self._free: list[int] = []

    def enter(self, tracker: RequestTracker) -> None:
        """Give a life a seat; its table grows when somebody asks for it."""
        ((table,), (source,)) = tracker.tables.by_group, tracker.sources
        if not self._free:
            self._add_seats()
        seat = self._free.pop()
        self.seat_of[tracker.request_id] = seat
        self._tables[seat] = table
        self._rows[seat, :_BLOCKS] = len(table), source, 0
        tracker.tables.complete = partial(self.hand_over, seat)

    def leave(self, request_id: str) -> None:
        """The life has a seat no more, if it had one; all it has got is in its table."""
        seat = self.seat_of.pop(request_id, None)
        if seat is not None:
            self.hand_over(seat)
            self._tables[seat] = []
            self._free.append(seat)

    def grew(self, seats: Sequence[int], blocks: Sequence[int]) -> Grown:
        """Each of these lives, once, got the block beside it."""
        at, new, rows = numbers(seats), numbers(blocks), self._rows
        of = rows[at].astype(np.int64)
        count = of[:, _COUNT]
        depths = of[:, _DEPTH] + count
        if count.max() == _ROOM:
            for seat in at[count == _ROOM].tolist():
                self.hand_over(seat)
            count = rows[at, _COUNT]
        rows[at, _BLOCKS + count] = new
        rows[at, _COUNT] = count + 1
        return Grown(new, of[:, _SOURCE], depths)

    def hand_over(self, seat: int) -> None:
        """Append to the seat's table what waits for it."""
        depth, _, count, *blocks = self._rows[seat].tolist()
        if count:
            self._tables[seat].extend(blocks[:count])
            self._rows[seat, _DEPTH], self._rows[seat, _COUNT] = depth + count, 0

    def forget_sources(self) -> None:
        """What these lives get from now on is nobody's: the caches were reset."""
        self._rows[:, _SOURCE] = NOBODY

    def _add_seats(self) -> None:
        first = len(self._tables)
        count = max(64, first)
        self._rows = np.concatenate((self._rows, np.zeros((count, _ROW), dtype=np.int32)))
        self._tables += [[] for _ in range(count)]
        self._free += range(first + count - 1, first - 1, -1)
