"""What the measuring commands have in common: options, progress, how they end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from moonstep.demo.process import EngineFailed

ModelOption = Annotated[Path, typer.Option(help="Folder of the model (the set-up makes it).")]
ThreadsOption = Annotated[
    int, typer.Option(min=0, help="CPUs each engine computes on (fewer on a busy machine); 0: all.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the engines' logs.")]
DEFAULT_MODEL = Path(".cache/models/smollm2-135m")
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write this file.")]


@contextmanager
def ends_cleanly(console: Console) -> Iterator[None]:
    """Ctrl-C and a plain kill leave through every ``with`` block, and say so in one line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("moonstep: interrupted.")
        raise typer.Exit(130) from None
    except (EngineFailed, ValueError) as error:
        if not str(error).startswith(("moonstep:", "the engine")):
            raise
        console.print(str(error), markup=False)
        raise typer.Exit(1) from None


def progress_bars(console: Console, *extra: BarColumn | MofNCompleteColumn) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *extra, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
