"""When to look at which life: those that this step may have given a whole block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonstep.groups import Group, alignment_tokens
from moonstep.scheduler.tracker import RequestTracker
from moonstep.scheduler.wheel import Wheel, steps_to_fill


class FillClock:
    """A wheel of lives, each entered under the step in which it can next fill a block.

    Of blocks of several lengths none counts before all groups come to a boundary.
    ``tokens_per_decode`` is the most tokens that a decode settles in one step.
    """

    def __init__(self, groups: Sequence[Group], tokens_per_decode: int) -> None:
        self._first = groups[0]
        self._align_blocks = alignment_tokens(groups) // self._first.block_tokens
        self._tokens_per_decode = tokens_per_decode
        self._wheel: Wheel[RequestTracker] = Wheel()
        self.has_due = self._wheel.has_due
        """Whether there may be lives to look at in a step."""

    def enter(self, tracker: RequestTracker, step: int) -> None:
        """Look at the life in ``step``."""
        self._wheel.enter(tracker, step)

    def leave(self, tracker: RequestTracker) -> None:
        """Look at the life no more."""
        self._wheel.leave(tracker)

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
        first, align_blocks, enter = self._first, self._align_blocks, self._wheel.enter
        for tracker in running:
            steps = 1
            if not tracker.is_prefilling:
                # All groups come to a boundary at once.
                stop = (tracker.next_block[first.index] // align_blocks + 1) * align_blocks
                missing_tokens = stop * first.block_tokens - tracker.token_len
                steps = steps_to_fill(missing_tokens, self._tokens_per_decode)
            enter(tracker, step + steps)
