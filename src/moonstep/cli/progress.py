"""Progress: how far a long command is, as a bar on a terminal, elsewhere as a line a minute."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    Told = Callable[[str, int, int], None]

LINE_EVERY_S = 60.0


class Lines:
    """Says how far it is at most once in so many seconds, first when the first of them are over."""

    def __init__(
        self,
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LINE_EVERY_S,
    ) -> None:
        self._write, self._clock, self._every_s = write, clock, every_s
        self._started_s = self._said_s = clock()

    def told(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` of a phase are over."""
        now_s = self._clock()
        if now_s - self._said_s >= self._every_s:
            self._said_s = now_s
            minutes = (now_s - self._started_s) / 60
            self._write(f"{minutes:.0f} min: {phase}, {min(done, total):,} of {total:,}\n")


@contextmanager
def progress(console: Console) -> Iterator[Told]:
    """What hears of progress, ``told(phase, done, total)``; it shows it or writes it to stderr."""
    if not console.is_terminal:
        yield Lines(_to_stderr).told
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text, bar = TextColumn("{task.description}"), BarColumn()
    with Progress(
        text, bar, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as shown:
        task = shown.add_task("starting", total=None)

        def told(phase: str, done: int, total: int) -> None:
            shown.update(task, description=phase, completed=min(done, total), total=total)

        yield told


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()
