"""``moonstep bench multiturn``: what a host cache saves in conversations that come and go.

Nothing is ever reset: the engine's own cache helps every row as far as its memory reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from moonstep.bench.engines import run_engine
from moonstep.bench.multiturn_child import TurnFigures
from moonstep.bench.multiturn_plan import Row

CHILD: Final = "moonstep.bench.multiturn_child"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row and what came of it."""

    row: Row
    figures: TurnFigures


def run_rows(rows: list[Row], out: Path, progress: Progress) -> list[Outcome]:
    """Run the rows one after the other; the engines' logs go to ``out``."""
    found = []
    for number, row in enumerate(rows):
        log = out / f"multiturn-{number}.log"
        raw = run_engine(row.name, row.plan, CHILD, log, progress)
        found.append(Outcome(row, TurnFigures(**raw)))
    return found


def as_table(found: list[Outcome]) -> Table:
    """All rows beside the first, which is the engine without a connector."""
    base = found[0]
    plan = base.row.plan
    title = (
        f"{plan.conversations} conversations x {plan.turns} turns, {plan.engine.dtype}, "
        f"KV memory of {plan.engine.kv_blocks - 1} blocks of {plan.engine.block_tokens} tokens;\n"
        f"prompts of {base.figures.prompt_tokens:,} tokens in all"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("engine", no_wrap=True)
    for heading in ("computed", "ratio", "seconds", "answers"):
        table.add_column(heading, justify="right")
    for one in found:
        same = one.figures.answers_digest == base.figures.answers_digest
        table.add_row(
            one.row.name,
            f"{one.figures.computed_tokens:,}",
            f"{one.figures.computed_tokens / base.figures.computed_tokens:.2f}",
            f"{one.figures.seconds:.1f}",
            "equal" if same else "differ",
        )
    return table
