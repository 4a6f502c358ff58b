"""What the scheduler half has done since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonstep.engine import Request
from moonstep.groups import Group
from moonstep.scheduler.misses import Look, missed
from moonstep.scheduler.tracker import LoadSpec, RequestTracker


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only grow. Tokens are counted once a request, blocks once a copy."""

    steps: int = 0
    lives: int = 0
    admitted_tokens: int = 0
    """Tokens of admitted requests that the engine's own cache did not have."""
    local_tokens: int = 0
    """Tokens of admitted requests that the engine had, or another connector brought."""
    restored_tokens: int = 0
    fetched_tokens: int = 0
    """Restored tokens that came from the store for the request they were restored for."""
    missed_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of admitted requests that were computed, by reason (``MissReason``)."""
    sliced_loads: int = 0
    """Restores too large for one step."""
    saved_blocks: int = 0
    saved_tokens: int = 0
    failed_blocks: int = 0
    """Captures that some rank did not carry out."""
    unvouched_blocks: int = 0
    """Blocks not captured because the engine's pool knew them by another name, or by none."""
    victim_tokens: int = 0
    """Tokens in full blocks that preempted requests had computed."""
    resumed_local_tokens: int = 0
    """Tokens that resumed requests still found in the engine's own cache."""
    resumed_restored_tokens: int = 0
    """Tokens that resumed requests got back from the host cache."""
    hook_ns: int = 0
    """Time spent in the connector's hooks in the scheduler process."""

    def count_life(
        self,
        request: Request,
        load: LoadSpec | None,
        num_computed_tokens: int,
        look: Look,
        group: Group,
    ) -> None:
        """Count what a new life needed, who had it, and why nobody did."""
        local_tokens = load.local_tokens if load else num_computed_tokens
        restored_tokens = load.external_tokens if load else 0
        self.lives += 1
        self.admitted_tokens += request.num_tokens - local_tokens
        self.local_tokens += local_tokens
        self.restored_tokens += restored_tokens
        self.fetched_tokens += min(look.fetched_tokens, restored_tokens)
        had_tokens = local_tokens + restored_tokens
        for reason, tokens in missed(request.num_tokens, had_tokens, group.block_tokens, look):
            if tokens:
                self.missed_tokens[reason.value] += tokens
        if request.num_preemptions:
            self.resumed_local_tokens += local_tokens
            self.resumed_restored_tokens += restored_tokens

    def count_victims(self, victims: Sequence[RequestTracker], block_tokens: int) -> None:
        """Count what preempted lives had computed, in full blocks of the first group."""
        self.victim_tokens += block_tokens * sum(tracker.next_block[0] for tracker in victims)
