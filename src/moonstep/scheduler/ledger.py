"""Captures that are under way: planned in a step, not yet reported by every rank.

A capture counts only when every rank has listed its step. A rank that has ended a later step and
never listed this one has failed it, whatever the reason: silence means failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moonstep.scheduler.captures import Capture
from moonstep.wire import RankReport


@dataclass(slots=True)
class _OpenStep:
    captures: list[Capture]
    waiting_for: set[int]
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of one step's captures: on every rank, or not."""

    step: int
    captures: list[Capture]
    captured: bool


class CaptureLedger:
    """Which steps' captures the ranks still owe a word on. Scheduler thread only."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._open: dict[int, _OpenStep] = {}  # Invariant: by ascending step

    def __len__(self) -> int:
        return sum(len(capture) for step in self._open.values() for capture in step.captures)

    def open(self, step: int, captures: list[Capture]) -> None:
        """Note what ``step`` captures. Steps ascend."""
        self._open[step] = _OpenStep(captures, set(range(self._rank_count)))

    def settle(self, by_rank: Mapping[int, RankReport]) -> Iterator[Settled]:
        """Take in reports; yield the steps on which every rank has now spoken, oldest first."""
        if not self._open:
            return
        for rank, report in by_rank.items():
            captured = set(report.captured)
            for step, entry in self._open.items():
                if step > report.through:
                    break
                if rank in entry.waiting_for:
                    entry.waiting_for.discard(rank)
                    entry.failed |= step not in captured
        ended = [step for step, entry in self._open.items() if not entry.waiting_for]
        for step in ended:
            entry = self._open.pop(step)
            yield Settled(step, entry.captures, captured=not entry.failed)
