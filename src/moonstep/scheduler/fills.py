"""When to look at which life: those that this step may have given a whole block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonstep.groups import Group
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.wheel import Wheel, steps_to_fill


class FillClock:
    """A wheel of lives, each entered under the step in which it can next fill a block.

    ``tokens_per_decode`` is the most tokens that a decode settles in one step.
    """

    def __init__(self, groups: Sequence[Group], tokens_per_decode: int) -> None:
        self._first, *self._others = groups
        self._tokens_per_decode = tokens_per_decode
        self._wheel: Wheel[RequestTracker] = Wheel()

    def enter(self, tracker: RequestTracker, step: int) -> None:
        """Look at the life in ``step``."""
        self._wheel.enter(tracker, step)

    def leave(self, tracker: RequestTracker) -> None:
        """Look at the life no more."""
        self._wheel.leave(tracker)

    def has_due(self, step: int) -> bool:
        """Whether there may be lives to look at in ``step``."""
        return self._wheel.has_due(step)

    def due(self, step: int, num_scheduled: Mapping[str, int]) -> list[RequestTracker]:
        """The lives to look at in ``step``, settled to what it computes.

        A life that is due but not scheduled is due again in the next step.
        """
        running: list[RequestTracker] = []
        for tracker in self._wheel.due(step):
            tokens = num_scheduled.get(tracker.request_id)
            if tokens is None:
                self._wheel.enter(tracker, step + 1)
            else:
                tracker.settle(tokens)
                running.append(tracker)
        return running

    def enter_again(self, running: Sequence[RequestTracker], step: int) -> None:
        """Enter lives that were looked at in ``step`` under their next one."""
        first, others, enter = self._first, self._others, self._wheel.enter
        for tracker in running:
            steps = 1
            if not tracker.is_prefilling:
                next_block = tracker.next_block
                boundary = (next_block[first.index] + 1) * first.block_tokens
                for group in others:
                    boundary = min(boundary, (next_block[group.index] + 1) * group.block_tokens)
                steps = steps_to_fill(boundary - tracker.token_len, self._tokens_per_decode)
            enter(tracker, step + steps)
