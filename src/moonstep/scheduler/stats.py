"""What the scheduler half has done since the start."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only grow. Tokens are counted once a request, blocks once a copy."""

    steps: int = 0
    lives: int = 0
    admitted_tokens: int = 0
    """Tokens of admitted requests that the engine's own cache did not have."""
    restored_tokens: int = 0
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

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
