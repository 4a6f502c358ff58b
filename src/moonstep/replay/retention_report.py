"""Retention intervals side by side, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moonstep.replay.retention import (
    RetentionFigures,
    RetentionPlan,
    replay_retention,
    states,
    windows,
)
from moonstep.replay.traces import Trace

INTERVALS_TOKENS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 0)


@dataclass(frozen=True, slots=True)
class RetentionOutcome:
    """One plan, and what came of it."""

    plan: RetentionPlan
    figures: RetentionFigures


def plans(block_tokens: int, sizes: Sequence[int]) -> list[RetentionPlan]:
    """Every interval of both kinds, with memory without end and with each of ``sizes`` blocks."""
    return [
        RetentionPlan(sparse, interval, size)
        for sparse in (windows(block_tokens), states(block_tokens))
        for interval in INTERVALS_TOKENS
        if interval % block_tokens == 0
        for size in (None, *sizes)
    ]


def run(trace: Trace, plan: RetentionPlan, done: Callable[[], None]) -> RetentionOutcome:
    """Run ``plan``, then tell ``done``."""
    figures = replay_retention(trace, plan)
    done()
    return RetentionOutcome(plan, figures)


def as_table(name: str, trace: Trace, found: Sequence[RetentionOutcome]) -> Table:
    """A row an interval: the share of bytes that is kept, and hits in the second half."""
    title = (
        f"{name}: {len(trace.requests):,} requests, {trace.input_tokens:,} tokens, blocks of "
        f"{trace.block_tokens};\nshare of prompt tokens that hit, second half, by memory in blocks"
    )
    sizes = list(dict.fromkeys(one.plan.whole_blocks for one in found))
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("beside full attention")
    for heading in ("interval", "kept", *("no limit" if s is None else f"{s:,}" for s in sizes)):
        table.add_column(heading, justify="right")
    for row in range(0, len(found), len(sizes)):
        ones = found[row : row + len(sizes)]
        plan, figures = ones[0].plan, ones[0].figures
        table.add_row(
            plan.sparse.layer_names[0],
            f"{plan.interval_tokens:,}" if plan.interval_tokens else "none",
            f"{figures.kept_share:.3f}",
            *(f"{100 * one.figures.hits.second_half:.2f} %" for one in ones),
        )
    return table
