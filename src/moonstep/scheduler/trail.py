"""What a life keeps of its windows and states only while it is near them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from moonstep.groups import Group, hit_blocks

ANCHORS: Final = 2
"""How many of a life's last boundaries can be resumed from: the newest may still be on its way."""


class Trail:
    """Boundaries a life can be resumed from when it is preempted, and what that takes.

    ``of_request`` are the boundaries at which its windows and states are kept for good.
    ``passing`` are, by group, the positions of the blocks it keeps only until it has moved on,
    ascending, each once.
    Where all prefixes share what a store has at multiples of ``unit_tokens``, the last of those is
    kept as well: the life may end before the next.
    """

    __slots__ = ("_anchors", "_unit_tokens", "of_request", "passing")

    def __init__(self, of_request: Sequence[int], start_tokens: int, unit_tokens: int = 0) -> None:
        self.of_request = tuple(of_request)
        self.passing: defaultdict[int, deque[int]] = defaultdict(deque)
        self._anchors: deque[int] = deque([start_tokens], ANCHORS)
        self._unit_tokens = unit_tokens

    @property
    def last_tokens(self) -> int:
        """The last boundary that was reached."""
        return self._anchors[-1]

    def reach(self, boundary_tokens: int) -> None:
        """The life can be resumed at this boundary from now on; an older one is forgotten."""
        if boundary_tokens > self._anchors[-1]:
            self._anchors.append(boundary_tokens)

    def pass_by(self, group_index: int, position: int) -> None:
        """Keep a block until the life has moved on.

        One may come again, behind others that came later: its capture failed, or it was evicted.
        """
        passing = self.passing[group_index]
        at = bisect_left(passing, position)
        if at == len(passing) or passing[at] != position:
            passing.insert(at, position)

    def left_behind(self, group: Group) -> list[int]:
        """Take out the group's passing positions that none of these boundaries needs."""
        return self._before(group, self._anchors[0])

    def let_go(self, group: Group) -> list[int]:
        """Take out the passing positions that the last boundary does not need."""
        return self._before(group, self._anchors[-1])

    def _before(self, group: Group, boundary_tokens: int) -> list[int]:
        passing, first = self.passing[group.index], hit_blocks(group, boundary_tokens).start
        stored = self._stored_positions(group, boundary_tokens)
        left: list[int] = []
        spared: list[int] = []
        while passing and passing[0] < first:
            position = passing.popleft()
            (spared if position in stored else left).append(position)
        passing.extendleft(reversed(spared))
        return left

    def _stored_positions(self, group: Group, boundary_tokens: int) -> set[int]:
        """What the store's last boundaries at or below these need."""
        if not self._unit_tokens:
            return set()
        below = (tokens // self._unit_tokens for tokens in (boundary_tokens, self._anchors[-1]))
        return {p for units in below for p in hit_blocks(group, units * self._unit_tokens)}
