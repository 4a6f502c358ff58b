"""``moonstep bench``: measurements, each of which says what it ran on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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

app = typer.Typer(
    help="Measure Moonstep: what a step costs, what a copy takes, what is saved.",
    no_args_is_help=True,
)

ModelOption = Annotated[Path, typer.Option(help="Folder of the model (the set-up makes it).")]
ThreadsOption = Annotated[
    int, typer.Option(min=0, help="CPUs each engine computes on (fewer on a busy machine); 0: all.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the engines' logs.")]
DEFAULT_MODEL = Path(".cache/models/smollm2-135m")
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write this file.")]


@contextmanager
def _ends_cleanly(console: Console) -> Iterator[None]:
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


def _progress(console: Console, *extra: BarColumn | MofNCompleteColumn) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *extra, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


@app.command(
    epilog="Examples:\n\n  moonstep bench schedule\n\n"
    "  moonstep bench schedule --part prompt --part lookup --json out/schedule.json"
)
def schedule(
    part: Annotated[
        list[str] | None,
        typer.Option(help="idle, fill, saves, prompt, lookup or pending; several if wanted."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of 16 steps in which the halves take turns.")
    ] = 4,
    stock: Annotated[bool, typer.Option(help="Also measure vLLM's own connector.")] = True,
    json_path: JsonOption = None,
) -> None:
    """What the scheduler half costs in a step, beside the connector that ships with vLLM."""
    from moonstep.audit.quiet import hush
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.outcome import write_json

    hush()
    from moonstep.bench.schedule_report import PARTS, as_table, cases

    console = Console()
    parts = tuple(part or PARTS)
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    machine = machine_facts()
    found = []
    with _ends_cleanly(console), _progress(console) as progress:
        task = progress.add_task("building the first case", total=None)
        for case in cases(parts, rounds=rounds, stock=stock):
            found.append(case)
            progress.update(task, description=f"done: {case.measured[0].case}")
    console.print(as_table(found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"rounds": rounds, "cases": found})


@app.command(epilog="Example:\n\n  moonstep bench copy --repeats 25 --json out/copy.json")
def copy(
    repeats: Annotated[int, typer.Option(min=3, help="Samples of each figure.")] = 25,
    json_path: JsonOption = None,
) -> None:
    """Capture and restore against memcpy: seven block shapes, 1 to 256 scattered blocks."""
    from moonstep.bench.copy import copy as measure

    with _ends_cleanly(Console()):
        measure(repeats, json_path)


@app.command(
    epilog="Examples:\n\n  moonstep bench memory\n\n"
    "  moonstep bench memory --prompt-tokens 8192 --interval 2048 --json out/memory.json"
)
def memory(
    prompt_tokens: Annotated[int, typer.Option(min=1_024, help="Length of the prompt.")] = 32_768,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a sliding window.")] = 1_024,
    windows: Annotated[int, typer.Option(min=1, help="Windows to one full attention.")] = 5,
    interval: Annotated[int, typer.Option(min=0, help="Setting retention_interval.")] = 8_192,
    json_path: JsonOption = None,
) -> None:
    """Host memory that a long prompt takes where most layers look through a window."""
    from moonstep.audit.quiet import hush
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.memory import MemoryCase, measure
    from moonstep.bench.memory_report import as_tables
    from moonstep.bench.outcome import write_json

    hush()
    console = Console()
    case = MemoryCase(prompt_tokens, windows, window, interval)
    case = replace(case, diverging=tuple(t for t in case.diverging if t < prompt_tokens))
    with _ends_cleanly(console), _progress(console) as progress:
        progress.add_task("counting", total=None)
        figures = measure(case)
    for table in as_tables(figures):
        console.print(table)
    if json_path is not None:
        write_json(json_path, machine_facts(), {"figures": figures, "share": figures.share})


@app.command(
    epilog="Examples:\n\n  moonstep bench store --folder /var/cache --json out/bench-store.json\n\n"
    "  moonstep bench store --store mooncake\n\n"
    "  moonstep bench store --store 'mooncake://10.0.0.5:50051?segment=0' --repeats 30"
)
def store(
    which: Annotated[
        str,
        typer.Option(
            "--store",
            help="'dir', 'mooncake' (a master and a process with memory, started here), or the "
            "mooncake:// URL of a store that others give memory to.",
        ),
    ] = "dir",
    repeats: Annotated[int, typer.Option(min=3, help="Samples of each figure.")] = 15,
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to measure; a temporary folder if not given.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Push and fetch of a store against plain files, or Mooncake's own client, of equal sizes."""
    if which == "dir":
        from moonstep.bench.store import store as measure

        with _ends_cleanly(Console()):
            measure(repeats, folder, json_path)
        return
    if folder is not None or not (which == "mooncake" or which.startswith("mooncake://")):
        raise typer.BadParameter("--store is dir, mooncake or mooncake://...; --folder is for dir")
    from moonstep.bench.mooncake import mooncake

    with _ends_cleanly(Console()):
        mooncake(repeats, None if which == "mooncake" else which, json_path)


@app.command(
    epilog="Examples:\n\n  moonstep bench replay --trace mooncake_conversation.jsonl.xz\n\n"
    "  moonstep bench replay --trace T.jsonl.xz --sizes 3000+12000 --token-bytes 131072"
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
    from moonstep.replay.traces import TraceError, read_trace

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
    with _ends_cleanly(console), _progress(console, BarColumn(), MofNCompleteColumn()) as progress:
        task = progress.add_task(f"reading {trace.name}", total=None)
        try:
            read = read_trace(trace, limit)
        except TraceError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        for plan in plans:
            what = f"{plan.engine_blocks:,} + {plan.host_blocks:,}, {plan.capture.value}"
            progress.update(task, description=what, total=len(read.requests))
            found.append(outcome(read, plan, lambda done: progress.update(task, completed=done)))
    console.print(as_table(trace.name, read, found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"trace": trace.name, "outcomes": found})


@app.command(
    epilog="Examples:\n\n  moonstep bench retention --trace mooncake_conversation.jsonl.xz\n\n"
    "  moonstep bench retention --trace T.jsonl.xz --blocks 5000 --limit 2000"
)
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
    from moonstep.replay.traces import TraceError, read_trace

    console = Console()
    machine = machine_facts()
    with _ends_cleanly(console), _progress(console, BarColumn(), MofNCompleteColumn()) as progress:
        task = progress.add_task(f"reading {trace.name}", total=None)
        try:
            read = read_trace(trace, limit)
        except TraceError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
        planned = plans(read.block_tokens, blocks or [10_000, 30_000])
        progress.update(task, description="replays", total=len(planned))
        found = [run(read, plan, lambda: progress.advance(task)) for plan in planned]
    console.print(as_table(trace.name, read, found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"trace": trace.name, "outcomes": found})


@app.command(
    epilog="Examples:\n\n  moonstep bench multiturn --json out/multiturn.json\n\n"
    "  moonstep bench multiturn --conversations 10 --turns 4 --seed 7"
)
def multiturn(
    model: ModelOption = DEFAULT_MODEL,
    conversations: Annotated[int, typer.Option(min=5, help="How many there are.")] = 20,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 8,
    seed: Annotated[int, typer.Option(help="Decides the order and the words.")] = 0,
    threads: ThreadsOption = 0,
    out: OutOption = Path("out"),
    json_path: JsonOption = None,
) -> None:
    """Conversations that come and go: prompt tokens a real engine computes, with and without.

    KV memory holds four of them. Beside Moonstep with a host cache of 1 and 4 times that memory
    stand engines without a connector whose KV memory has the same bytes in addition.
    """
    from moonstep.bench.engines import model_token_bytes
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.multiturn import as_table, run_rows
    from moonstep.bench.multiturn_plan import rows
    from moonstep.bench.outcome import write_json
    from moonstep.demo.plan import usable_cpus

    console = Console()
    machine = machine_facts()
    with _ends_cleanly(console), _progress(console, BarColumn(), MofNCompleteColumn()) as progress:
        cpus = usable_cpus()[: threads or None]
        token_bytes = model_token_bytes(model, dtype_bytes=4)
        plans = rows(str(model), cpus, token_bytes, seed, conversations, turns)
        found = run_rows(plans, out, progress)
    console.print(as_table(found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"seed": seed, "outcomes": found})


@app.command(
    epilog="Examples:\n\n  moonstep bench peers --starts 10 --json out/peers.json\n\n"
    "  moonstep bench peers --starts 2 --chunk-tokens 64"
)
def peers(
    model: ModelOption = DEFAULT_MODEL,
    starts: Annotated[int, typer.Option(min=1, help="Rounds; two engines in each.")] = 10,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Moonstep's setting of this name; vLLM's stores blocks of 64."),
    ] = None,
    threads: ThreadsOption = 0,
    out: OutOption = Path("out"),
    json_path: JsonOption = None,
) -> None:
    """Warm starts over one Mooncake Store, with Moonstep and with vLLM's own connector, in turns.

    A master and a process with 2 GiB of memory are started for it. Each start takes about half a
    minute on two cores.
    """
    from moonstep.bench.engines import model_token_bytes
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.outcome import write_json
    from moonstep.bench.peers import as_table, run_peers
    from moonstep.demo.plan import usable_cpus

    console = Console()
    machine = machine_facts()
    with _ends_cleanly(console), _progress(console, BarColumn(), MofNCompleteColumn()) as progress:
        model_token_bytes(model, dtype_bytes=4)  # refuses a folder without a model
        cpus = usable_cpus()[: threads or None]
        found = run_peers(model, cpus, starts, chunk_tokens, out, progress)
    console.print(as_table(found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        content = {
            "starts": starts,
            "chunk_tokens": chunk_tokens,
            "outcome": found,
            "ratio": found.ratio,
        }
        write_json(json_path, machine, content)


@app.command(
    epilog="Examples:\n\n  moonstep bench engine --starts 10 --json out/engine.json\n\n"
    "  moonstep bench engine --starts 2"
)
def engine(
    model: ModelOption = DEFAULT_MODEL,
    starts: Annotated[int, typer.Option(min=1, help="Rounds; two engines in each.")] = 10,
    threads: ThreadsOption = 0,
    out: OutOption = Path("out"),
    json_path: JsonOption = None,
) -> None:
    """Real engines with and without Moonstep, in turns: cold, warm and storm, with intervals.

    Every start takes about a minute on two cores.
    """
    from moonstep.bench.engines import model_token_bytes
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.outcome import write_json
    from moonstep.bench.starts import PHASES, as_table, run_starts
    from moonstep.demo.plan import usable_cpus

    console = Console()
    machine = machine_facts()
    with _ends_cleanly(console), _progress(console, BarColumn(), MofNCompleteColumn()) as progress:
        cpus = usable_cpus()[: threads or None]
        model_token_bytes(model, dtype_bytes=4)  # says in one line when there is no model
        found = run_starts(model, cpus, starts, out, progress)
    console.print(as_table(found))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        ratios = {phase: found.ratio(phase) for phase in PHASES}
        write_json(json_path, machine, {"ratios": ratios, "starts": found})


@app.command(
    epilog="Examples:\n\n  moonstep bench gap --json out/gap.json\n\n"
    "  moonstep bench gap --restores 4 --size 64MiB"
)
def gap(
    model: ModelOption = DEFAULT_MODEL,
    restores: Annotated[int, typer.Option(min=1, max=40, help="How many prompts come back.")] = 9,
    size: Annotated[str, typer.Option(help="What each of them restores at least.")] = "128MiB",
    threads: ThreadsOption = 0,
    out: OutOption = Path("out"),
    json_path: JsonOption = None,
) -> None:
    """The worst gap between two tokens of one request while another's prompt is restored.

    One engine, about a minute and a half on two cores.
    """
    from moonstep.bench.engines import model_token_bytes
    from moonstep.bench.gap import as_table, plan, run_gap
    from moonstep.bench.machine import machine_facts
    from moonstep.bench.outcome import write_json
    from moonstep.config import parse_size
    from moonstep.demo.plan import usable_cpus

    console = Console()
    try:
        restore_bytes = parse_size("--size", size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    machine = machine_facts()
    with _ends_cleanly(console), _progress(console, BarColumn(), MofNCompleteColumn()) as progress:
        cpus = usable_cpus()[: threads or None]
        token_bytes = model_token_bytes(model, dtype_bytes=4)
        chosen = plan(str(model), cpus, token_bytes, restore_bytes, restores)
        windows = run_gap(chosen, out, progress)
    console.print(as_table(chosen, windows))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"plan": chosen, "windows": windows})
