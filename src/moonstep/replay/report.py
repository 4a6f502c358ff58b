"""Outcomes of replays and their table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moonstep.replay.run import References, ReplayFigures, ReplayPlan, Tick, references, replay
from moonstep.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """One plan, what came of it, and the plain caches beside it."""

    plan: ReplayPlan
    figures: ReplayFigures
    references: References


def outcome(trace: Trace, plan: ReplayPlan, tick: Tick) -> Outcome:
    """Run ``plan`` and its references."""
    return Outcome(plan, replay(trace, plan, tick), references(trace, plan))


def parse_sizes(text: str) -> tuple[int, int]:
    """Blocks of the engine and of the host cache.

    >>> parse_sizes("3000+12000")
    (3000, 12000)

    Raises:
        ValueError: it is not two numbers with a plus between them.
    """
    match = re.fullmatch(r"\s*(\d+)\s*\+\s*(\d+)\s*", text)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r}: write the blocks of engine and host cache as 3000+3000")
    return int(match[1]), int(match[2])


def as_table(name: str, trace: Trace, found: list[Outcome]) -> Table:
    """Hit rates of the second half, by tokens, and what they took."""
    title = (
        f"{name}: {len(trace.requests):,} requests, {trace.input_tokens:,} tokens, blocks of "
        f"{trace.block_tokens};\nshare of prompt tokens that hit, second half"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("blocks")
    table.add_column("capture")
    for heading in ("engine", "with Moonstep", "LRU of both", "captured", "restored"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            f"{one.plan.engine_blocks:,} + {one.plan.host_blocks:,}",
            one.plan.capture.value,
            _percent(one.references.engine_alone.second_half),
            _percent(one.figures.both.second_half),
            _percent(one.references.joined.second_half),
            f"{one.figures.captured_blocks:,}",
            f"{one.figures.restored_blocks:,}",
        )
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
