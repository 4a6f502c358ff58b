"""At which boundaries of a prefix its windows and states are kept.

Full attention keeps every block, so it can resume at every boundary. A window or a state is worth
its memory only where a later request is likely to go on: where the same prompt sent again would
(*resend*), where a longer one would (*extension*), where the engine has seen prefixes part, and
once in an interval for those that part elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.engine import Request
from moonstep.groups import (
    Group,
    alignment_tokens,
    interval_ends,
    kept_positions,
    replay_boundaries,
)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries of one engine: multiples of ``align_tokens``, which all its groups share.

    One in ``interval_tokens`` is kept whatever the request is, none if that is 0. In a store all
    prefixes share what ends at multiples of ``unit_tokens``: where there is one, the last of those
    is kept too.
    """

    groups: tuple[Group, ...]
    align_tokens: int
    interval_tokens: int
    unit_tokens: int = 0

    @classmethod
    def of(cls, groups: Sequence[Group], interval_tokens: int, unit_tokens: int = 0) -> Boundaries:
        """Boundaries that all ``groups`` share; the interval is cut down to whole ones, or units.

        >>> from moonstep.groups import GroupKind
        >>> groups = [Group(i, GroupKind.FULL_ATTENTION, n, 1, ()) for i, n in ((0, 16), (1, 48))]
        >>> [Boundaries.of(groups, tokens).interval_tokens for tokens in (0, 7, 100)]
        [0, 48, 96]
        """
        align = alignment_tokens(groups)
        step = unit_tokens or align
        whole = max(step, interval_tokens // step * step) if interval_tokens else 0
        return cls(tuple(groups), align, whole, unit_tokens)

    @property
    def strides(self) -> list[int]:
        """By group number, how many steps of depth one block is, so that all stand in one order.

        >>> from moonstep.groups import GroupKind
        >>> groups = [Group(i, GroupKind.FULL_ATTENTION, n, 1, ()) for i, n in ((0, 32), (2, 48))]
        >>> Boundaries.of(groups, 0).strides
        [2, 1, 3]
        """
        strides = [1] * (self.groups[-1].index + 1)  # groups that keep nothing have no number
        unit = math.gcd(*(group.block_tokens for group in self.groups))
        for group in self.groups:
            strides[group.index] = group.block_tokens // unit
        return strides

    def below(self, tokens: int) -> int:
        """The highest boundary at or below ``tokens``."""
        return tokens // self.align_tokens * self.align_tokens

    def stored_below(self, tokens: int) -> int:
        """The highest multiple of ``unit_tokens`` at or below ``tokens``; 0 without a store."""
        return tokens // self.unit_tokens * self.unit_tokens if self.unit_tokens else 0

    def of_request(self, request: Request) -> tuple[int, ...]:
        """Boundaries that are kept for what this request is, ascending.

        A prompt sent again has to compute its last token, so it resumes below that; a longer one
        can go on from the prompt's last boundary.
        """
        replays = replay_boundaries(self.groups, request.num_prompt_tokens)
        junction = getattr(request, "shared_prefix_boundary", 0) or 0
        kept = {*replays, self.below(junction)}
        return tuple(sorted((kept | set(map(self.stored_below, kept))) - {0}))

    def is_kept(self, boundary_tokens: int, of_request: Sequence[int]) -> bool:
        """Whether ``boundary_tokens`` is one of those, or the end of an interval."""
        interval = self.interval_tokens
        return boundary_tokens in of_request or bool(interval and boundary_tokens % interval == 0)

    def stored_between(
        self, first_tokens: int, stop_tokens: int, of_request: Sequence[int]
    ) -> list[int]:
        """The kept boundaries in ``(first, stop]``, ascending, if there is a store; else none."""
        if not self.unit_tokens:
            return []
        kept = {b for b in of_request if first_tokens < b <= stop_tokens}
        kept.update(interval_ends(self.interval_tokens, first_tokens, stop_tokens))
        return sorted(kept)

    def kept_positions(
        self, group: Group, first: int, stop: int, of_request: Sequence[int]
    ) -> list[int]:
        """Those of the positions ``[first, stop)`` of a group's table that a kept boundary needs.

        >>> from moonstep.groups import GroupKind
        >>> window = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
        >>> Boundaries.of([window], 128).kept_positions(window, 0, 20, [80])
        [3, 4, 6, 7, 14, 15]
        """
        # The end of an interval needs blocks at most a window before it, and its proof.
        above = max(0, first - group.proof_blocks) * group.block_tokens
        ends = interval_ends(
            self.interval_tokens, above, (stop + group.window_blocks) * group.block_tokens
        )
        return kept_positions(group, (*of_request, *ends), first, stop)
