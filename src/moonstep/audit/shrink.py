"""Shrink: makes the history of a finding short. Any subset of a history is a history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moonstep.audit import driver
from moonstep.audit.history import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.findings import Finding
    from moonstep.audit.history import Event
    from moonstep.audit.shape import Shape


def shrink(
    events: Sequence[Event], fails: Callable[[Sequence[Event]], bool], deadline_s: float = 60.0
) -> list[Event]:
    """A sublist for which `fails` still holds and that no single removal makes shorter.

    Delta debugging: pieces are removed, large ones first. After `deadline_s` it is as short as it
    got by then.

    >>> shrink([1, 2, 3, 4, 5, 6, 7, 8], lambda some: 3 in some and 6 in some)
    [3, 6]
    """
    end = time.monotonic() + deadline_s
    left = list(events)
    pieces = 2
    while len(left) >= 2 and time.monotonic() < end:
        size = -(-len(left) // pieces)
        for start in range(0, len(left), size):
            shorter = left[:start] + left[start + size :]
            if fails(shorter):
                left, pieces = shorter, max(pieces - 1, 2)
                break
            if time.monotonic() > end:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(left))
    return left


def split_steps(events: Sequence[Event]) -> list[Event]:
    """The same history with every run of steps taken apart, so that single steps can go."""
    apart: list[Event] = []
    for event in events:
        apart.extend([Step()] * event.count if isinstance(event, Step) else [event])
    return apart


def join_steps(events: Sequence[Event]) -> list[Event]:
    """The same history with neighbouring steps counted together."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Step) and isinstance(last, Step):
            joined[-1] = Step(last.count + event.count)
        else:
            joined.append(event)
    return joined


def shrink_history(
    shape: Shape,
    connector: ConnectorChoice,
    events: Sequence[Event],
    finding: Finding,
    deadline_s: float = 60.0,
) -> list[Event]:
    """A short history in which the same kind of finding shows."""

    def fails(some: Sequence[Event]) -> bool:
        found = driver.run_events(shape, connector, some).finding
        return found is not None and found.kind == finding.kind

    coarse = shrink(events, fails, deadline_s / 2)
    return join_steps(shrink(split_steps(coarse), fails, deadline_s / 2))
