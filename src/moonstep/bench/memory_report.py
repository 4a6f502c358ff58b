"""``moonstep bench memory``: the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonstep.bench.memory import MemoryFigures


def as_tables(figures: MemoryFigures) -> Iterator[Table]:
    """Blocks by group, then hits."""
    case = figures.case
    table = Table(
        title=f"{case.prompt_tokens:,} tokens, {case.windows} windows of {case.window_tokens:,} to "
        f"one full attention, interval {case.interval_tokens:,}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("group")
    table.add_column("blocks kept", justify="right")
    table.add_column("of", justify="right")
    table.add_column("share", justify="right")
    whole = case.prompt_tokens // case.block_tokens
    for group, blocks in enumerate(figures.group_blocks):
        name = f"{group} {'window' if group else 'full attention'}"
        table.add_row(name, f"{blocks:,}", f"{whole:,}", f"{blocks / whole:.3f}")
    rows = (
        ("all", figures.kept_blocks),
        ("most while it was computed", figures.prefill_peak_blocks),
    )
    for name, blocks in rows:
        share = blocks / case.whole_blocks
        table.add_row(name, f"{blocks:,}", f"{case.whole_blocks:,}", f"{share:.3f}")
    more = figures.decode_peak_blocks
    table.add_row(f"more while {case.answer_tokens} tokens were decoded", f"{more:,}", "", "")
    yield table
    hits = Table(title="Tokens from the host cache", title_justify="left", box=SIMPLE_HEAD)
    hits.add_column("prompt")
    hits.add_column("hit", justify="right")
    hits.add_column("if all were kept", justify="right")
    hits.add_column("lost", justify="right")
    for hit in figures.hits:
        hits.add_row(hit.what, f"{hit.tokens:,}", f"{hit.whole_tokens:,}", f"{hit.lost_tokens:,}")
    yield hits
