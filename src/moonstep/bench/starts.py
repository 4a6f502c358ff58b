"""``moonstep bench engine``: wall-clock times of real engines with and without Moonstep.

A single start differs from the next by a tenth or more, so engines are started many times, in
turns, and figures are ratios of means with their 95 % interval. What each start runs is the demo's
programme, shortened: prompts nobody has seen (cold), the same again after the engine's own cache
has given them away (warm), one of them while another request decodes, and a storm of more requests
than KV memory holds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from moonstep.bench.engines import run_engine
from moonstep.bench.intervals import Interval, ratio_of_means
from moonstep.demo.plan import DemoPlan

CHILD: Final = "moonstep.demo.child"
PHASES: Final = ("cold", "warm", "storm")


@dataclass(frozen=True, slots=True)
class Start:
    """One engine's times. ``cold_s`` and ``warm_s`` are medians over its prompts."""

    start_s: float
    cold_s: float
    warm_s: float
    storm_s: float
    gap_worst_s: float
    gap_median_s: float
    preemptions: int
    restored_tokens: int
    victim_tokens: int
    """Settled tokens, in full blocks, of the requests that the storm preempted."""
    resumed_tokens: int
    """... of which so many were there when the requests came back."""
    storm_answers: tuple[tuple[int, ...], ...]

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> Self:
        """From what the demo's child process sent."""
        storm, gaps = raw["storm"], raw["gaps_s"]
        returns = raw["returns"]
        in_returns = sum(answer["connector"]["restored_tokens"] for answer in returns)
        return cls(
            start_s=raw["start_s"],
            cold_s=statistics.median(answer["first_token_s"] for answer in raw["first_visits"]),
            warm_s=statistics.median(answer["first_token_s"] for answer in returns),
            storm_s=storm["wall_s"],
            gap_worst_s=max(gaps),
            gap_median_s=statistics.median(gaps),
            preemptions=storm["preemptions"],
            restored_tokens=in_returns + storm["connector"]["restored_tokens"],
            victim_tokens=storm["connector"]["victim_tokens"],
            resumed_tokens=storm["connector"]["resumed_tokens"],
            storm_answers=tuple(tuple(tokens) for tokens in storm["tokens"]),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """All starts, in the order of the rounds."""

    plain: list[Start]
    moonstep: list[Start]

    def ratio(self, phase: str) -> Interval:
        """Moonstep's time of ``phase`` (of ``PHASES``, or ``start``) over that without it."""
        name = f"{phase}_s"
        return ratio_of_means(
            [getattr(start, name) for start in self.moonstep],
            [getattr(start, name) for start in self.plain],
            paired=True,
        )

    @property
    def answers_differ(self) -> int:
        """Answers of the storms that are not those of the first start without Moonstep."""
        expected = self.plain[0].storm_answers
        return sum(
            answer != other
            for start in (*self.plain, *self.moonstep)
            for answer, other in zip(start.storm_answers, expected, strict=True)
        )


def plan(model: str, cpus: tuple[int, ...], *, with_moonstep: bool) -> DemoPlan:
    """One start's engine: the demo's, with shorter prompts, a smaller storm and as little memory.

    Three prompts fit, so the first of five has long been given away.
    """
    return DemoPlan(
        model=model,
        with_moonstep=with_moonstep,
        cpus=cpus,
        prompt_tokens=1000,
        prompt_count=5,
        return_count=3,
        gap_returns=1,
        storm_requests=15,
        kv_blocks=64,
        max_model_tokens=2048,
    )


def run_starts(
    model: Path, cpus: tuple[int, ...], starts: int, out: Path, progress: Progress
) -> Outcome:
    """``starts`` rounds of two engines; who goes first changes with every round."""
    found: dict[bool, list[Start]] = {False: [], True: []}
    for number in range(starts):
        order = (False, True) if number % 2 == 0 else (True, False)
        for with_moonstep in order:
            who = "Moonstep" if with_moonstep else "no connector"
            log = out / f"engine-{number}-{who.replace(' ', '-').lower()}.log"
            name = f"start {number + 1} of {starts}, {who}"
            engine = plan(str(model), cpus, with_moonstep=with_moonstep)
            raw = run_engine(name, engine, CHILD, log, progress)
            found[with_moonstep].append(Start.from_raw(raw))
    return Outcome(plain=found[False], moonstep=found[True])


def as_table(found: Outcome) -> Table:
    """Means of both, and the ratio with its interval."""
    shape = plan("", (), with_moonstep=True)
    title = (
        f"{len(found.plain)} alternating starts of each; {shape.prompt_count} prompts of "
        f"{shape.prompt_tokens:,} tokens, storm of {shape.storm_requests} requests, {shape.dtype}"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for heading in ("no connector", "Moonstep", "ratio [95 %]"):
        table.add_column(heading, justify="right")
    for phase in (*PHASES, "start"):
        means = [
            statistics.fmean(getattr(start, f"{phase}_s") for start in starts)
            for starts in (found.plain, found.moonstep)
        ]
        table.add_row(phase, *(f"{mean:.2f} s" for mean in means), str(found.ratio(phase)))
    gaps = [
        statistics.median(start.gap_worst_s / start.gap_median_s for start in starts)
        for starts in (found.plain, found.moonstep)
    ]
    table.add_row("worst token gap / median", *(f"{gap:.2f}" for gap in gaps), "")
    for name in ("preemptions", "restored_tokens", "victim_tokens", "resumed_tokens"):
        counts = [
            f"{statistics.fmean(getattr(start, name) for start in starts):,.0f}"
            for starts in (found.plain, found.moonstep)
        ]
        table.add_row(name.replace("_", " "), *counts, "")
    table.add_row("answers that differ", "", f"{found.answers_differ}", "")
    return table
