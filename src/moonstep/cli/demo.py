"""``moonstep demo``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moonstep.demo.process import EngineFailed
from moonstep.demo.run import run_demo


def demo(
    model: Annotated[Path, typer.Option(help="Folder of the model (the set-up makes it).")] = Path(
        ".cache/models/smollm2-135m"
    ),
    out: Annotated[Path, typer.Option(help="Folder for demo.json and the logs.")] = Path("out"),
) -> None:
    """Show on a real engine what Moonstep saves, and that answers stay the same."""
    console = Console()
    if not (model / "config.json").is_file():
        console.print(f"moonstep: there is no model in {model}; `make setup` makes it.")
        raise typer.Exit(2)
    # A plain `kill` leaves the way Ctrl-C does: through the block that ends the engine.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        verdicts = run_demo(model, out, console)
    except EngineFailed as failure:
        console.print(str(failure), markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("moonstep: interrupted; the engine has been ended.")
        raise typer.Exit(130) from None
    # A timing beyond its bound is shown as it is; a wrong answer is a defect.
    if any(check.about_answers and not check.holds for check in verdicts):
        raise typer.Exit(1)
