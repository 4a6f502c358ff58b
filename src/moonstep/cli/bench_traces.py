"""``moonstep bench replay`` and ``retention``: measurements on traces, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn

from moonstep.cli.benching import JsonOption, ends_cleanly, progress_bars

if TYPE_CHECKING:
    from moonstep.replay.traces import Trace

REPLAY_EXAMPLES = (
    "Examples:\n\n  moonstep bench replay --trace mooncake_conversation.jsonl.xz\n\n"
    "  moonstep bench replay --trace T.jsonl.xz --sizes 3000+12000 --token-bytes 131072"
)
RETENTION_EXAMPLES = (
    "Examples:\n\n  moonstep bench retention --trace mooncake_conversation.jsonl.xz\n\n"
    "  moonstep bench retention --trace T.jsonl.xz --blocks 5000 --limit 2000"
)


def replay(
    trace: Annotated[Path, typer.Option(help="A trace: JSON lines, .xz or plain.", exists=True)],
    sizes: Annotated[
        list[str] | None,
        typer.Option(help="Blocks of the engine + of the host cache; several times if wanted."),
    ] = None,
    capture: Annotated[str, typer.Option(help="lazy, eager or both.")] = "both",
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prefill step.")] = 8192,
    token_bytes: Annotated[
        int, typer.Option(min=0, help="KV bytes of a token, for the byte budgets; 0: no budgets.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first requests.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Hit rates of a request trace: Moonstep's own index behind a model of the engine's cache."""
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.outcome import write_json
    from moonstep.config import CaptureMode
    from moonstep.replay.report import as_table, outcome, parse_sizes
    from moonstep.replay.run import ReplayPlan

    console = Console()
    try:
        pairs = [parse_sizes(text) for text in sizes or ("3000+3000", "10000+10000")]
        modes = list(CaptureMode) if capture == "both" else [CaptureMode(capture)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    machine = machine_facts()
    plans = [
        ReplayPlan(engine, host, mode, step_tokens, token_bytes)
        for engine, host in pairs
        for mode in modes
    ]
    found = []
    with (
        ends_cleanly(console),
        progress_bars(console, BarColumn(), MofNCompleteColumn()) as progress,
    ):
        task = progress.add_task(f"reading {trace.name}", total=None)
        read = _read(console, trace, limit)
        for plan in plans:
            what = f"{plan.engine_blocks:,} + {plan.host_blocks:,}, {plan.capture.value}"
            progress.update(task, description=what, total=len(read.requests))
            found.append(outcome(read, plan, lambda done: progress.update(task, completed=done)))
    console.print(as_table(trace.name, read, found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"trace": trace.name, "outcomes": found})


def retention(
    trace: Annotated[Path, typer.Option(help="A trace: JSON lines, .xz or plain.", exists=True)],
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Memory in blocks kept whole; several times if wanted."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first requests.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Hit rates of a request trace by setting retention_interval, for windows and for states."""
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.outcome import write_json
    from moonstep.replay.retention_report import as_table, plans, run

    console = Console()
    machine = machine_facts()
    with (
        ends_cleanly(console),
        progress_bars(console, BarColumn(), MofNCompleteColumn()) as progress,
    ):
        task = progress.add_task(f"reading {trace.name}", total=None)
        read = _read(console, trace, limit)
        planned = plans(read.block_tokens, blocks or [10_000, 30_000])
        progress.update(task, description="replays", total=len(planned))
        found = [run(read, plan, lambda: progress.advance(task)) for plan in planned]
    console.print(as_table(trace.name, read, found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"trace": trace.name, "outcomes": found})


def _read(console: Console, trace: Path, limit: int | None) -> Trace:
    """The trace; one that cannot be read ends the command with a line that says why."""
    from moonstep.replay.traces import TraceError, read_trace

    try:
        return read_trace(trace, limit)
    except TraceError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from None
