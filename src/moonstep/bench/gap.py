"""``moonstep bench gap``: what a large restore costs a request that is decoding meanwhile.

One request decodes. Now and then a prompt comes back that the host cache has and the engine has
not: it is restored in slices, beside the decoding. The figure is the worst gap between two tokens
of the decoding request while that happens, over the median of its gaps when it is alone. Before
each restore the request decodes as many tokens undisturbed: that window's own worst gap stands
beside it, since a step of a real engine now and then takes longer for no reason of ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from moonstep.bench.engines import run_engine
from moonstep.demo.plan import DemoPlan

_SPARE_BLOCKS: Final = 4
CHILD: Final = "moonstep.bench.gap_child"
WINDOW_TOKENS: Final = 24
MOST: Final = 1.5
"""The bound: the worst gap, in medians."""


@dataclass(frozen=True, slots=True)
class GapPlan:
    """One engine that decodes one request while prompts come back."""

    engine: DemoPlan
    restores: int
    restore_bytes: int
    """Every restore has at least so many."""
    window_tokens: int = WINDOW_TOKENS
    """Tokens decoded beside each restore, and as many before it; a restore takes fewer steps."""

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """The plan that ``to_json`` wrote."""
        return cls(**{**raw, "engine": DemoPlan.from_json(raw["engine"])})

    def environment(self) -> dict[str, str]:
        """Environment variables that the engine reads at import."""
        return self.engine.environment()


@dataclass(frozen=True, slots=True)
class Window:
    """The gaps of the decoding request beside one restore, and just before it."""

    alone_s: list[float]
    beside_s: list[float]
    restored_bytes: int

    @property
    def median_s(self) -> float:
        """The usual gap when the request is alone."""
        return statistics.median(self.alone_s)

    @property
    def worst_alone(self) -> float:
        """The worst gap without a restore, in medians."""
        return max(self.alone_s) / self.median_s

    @property
    def worst_beside(self) -> float:
        """The worst gap beside the restore, in medians."""
        return max(self.beside_s) / self.median_s


def windows_of(
    times_s: Sequence[float], restored_bytes: Sequence[int], window_tokens: int
) -> list[Window]:
    """Windows of a request whose tokens came at ``times_s``: ``window_tokens`` gaps alone, as many
    beside a restore, and so on. ``restored_bytes`` are totals before the first window and after
    each.

    >>> windows_of([0.0, 1.0, 3.0], [0, 7], window_tokens=1)
    [Window(alone_s=[1.0], beside_s=[2.0], restored_bytes=7)]
    """
    gaps = [after - before for before, after in pairwise(times_s)]
    windows = []
    for number, (before, after) in enumerate(pairwise(restored_bytes)):
        first = 2 * number * window_tokens
        middle, last = first + window_tokens, first + 2 * window_tokens
        windows.append(Window(gaps[first:middle], gaps[middle:last], after - before))
    return windows


def plan(
    model: str, cpus: tuple[int, ...], token_bytes: int, restore_bytes: int, restores: int
) -> GapPlan:
    """Prompts that restore at least ``restore_bytes`` each and are out of KV memory when they come
    back: it holds two of them, and three take turns.

    A prompt is whole blocks and one token, which alone is computed: what is measured is a restore
    and not the prefill of what is left over.
    """
    engine = DemoPlan(model, with_moonstep=True, cpus=cpus)
    block_tokens = engine.block_tokens
    decoded_tokens = block_tokens + 2 * WINDOW_TOKENS * restores + 1
    decoding_blocks = -(-decoded_tokens // block_tokens)
    # The engine may still hold the first few blocks of a prompt that comes back, among them as many
    # as the request that decodes has yet to take.
    blocks = -(-restore_bytes // (block_tokens * token_bytes)) + _SPARE_BLOCKS + decoding_blocks
    return GapPlan(
        engine=replace(
            engine,
            kv_blocks=2 * blocks + decoding_blocks + 1,
            max_model_tokens=max(blocks + 2, decoding_blocks) * block_tokens,
            host_cache=f"{8 * blocks * block_tokens * token_bytes}B",
            prompt_count=3,
            prompt_tokens=blocks * block_tokens + 1,
        ),
        restores=restores,
        restore_bytes=restore_bytes,
    )


def run_gap(chosen: GapPlan, out: Path, progress: Progress) -> list[Window]:
    """Start the engine of the plan once; a window for each restore.

    Raises:
        EngineFailed: it did not start, or a prompt that came back was not restored whole.
    """
    raw = run_engine("gap", chosen, CHILD, out / "engine-gap.log", progress)
    return [Window(**window) for window in raw["windows"]]


def as_table(chosen: GapPlan, windows: list[Window]) -> Table:
    """A line for each restore, and the medians over them."""
    title = (
        f"Gaps between the tokens of a decoding request, alone and beside a restore;\n"
        f"prompts of {chosen.engine.prompt_tokens:,} tokens, {chosen.engine.dtype}"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    headings = ("restore", "restored", "median gap", "worst alone", "worst beside", "ratio")
    for heading in headings:
        table.add_column(heading, justify="right")
    for number, window in enumerate(windows, 1):
        table.add_row(
            f"{number}",
            f"{window.restored_bytes / 1e6:.0f} MB",
            f"{window.median_s * 1e3:.1f} ms",
            f"{max(window.alone_s) * 1e3:.1f} ms",
            f"{max(window.beside_s) * 1e3:.1f} ms",
            f"{window.worst_beside:.2f}",
            end_section=number == len(windows),
        )
    ratio = statistics.median(window.worst_beside for window in windows)
    alone = statistics.median(window.worst_alone for window in windows)
    verdict = "[green]holds[/]" if ratio <= MOST else "[red]fails[/]"
    table.add_row("median", "", "", f"{alone:.2f}", f"{ratio:.2f}", f"<= {MOST}: {verdict}")
    return table
