"""``moonstep bench``: measurements, each of which says what it ran on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn

from moonstep.cli import bench_traces
from moonstep.cli.benching import (
    DEFAULT_MODEL,
    JsonOption,
    ModelOption,
    OutOption,
    ThreadsOption,
    ends_cleanly,
    progress_bars,
)

app = typer.Typer(
    help="Measure Moonstep: what a step costs, what a copy takes, what is saved.",
    no_args_is_help=True,
)
app.command(epilog=bench_traces.REPLAY_EXAMPLES)(bench_traces.replay)
app.command(epilog=bench_traces.RETENTION_EXAMPLES)(bench_traces.retention)


@app.command(
    epilog="Examples:\n\n  moonstep bench schedule\n\n"
    "  moonstep bench schedule --part prompt --part lookup --json out/schedule.json"
)
def schedule(
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="idle, fill, saves, prompt, lookup, joint or pending; several if wanted."
        ),
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
    with ends_cleanly(console), progress_bars(console) as progress:
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

    with ends_cleanly(Console()):
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
    with ends_cleanly(console), progress_bars(console) as progress:
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

        with ends_cleanly(Console()):
            measure(repeats, folder, json_path)
        return
    if folder is not None or not (which == "mooncake" or which.startswith("mooncake://")):
        raise typer.BadParameter("--store is dir, mooncake or mooncake://...; --folder is for dir")
    from moonstep.bench.mooncake import mooncake

    with ends_cleanly(Console()):
        mooncake(repeats, None if which == "mooncake" else which, json_path)


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
    with (
        ends_cleanly(console),
        progress_bars(console, BarColumn(), MofNCompleteColumn()) as progress,
    ):
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
    with (
        ends_cleanly(console),
        progress_bars(console, BarColumn(), MofNCompleteColumn()) as progress,
    ):
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
    with (
        ends_cleanly(console),
        progress_bars(console, BarColumn(), MofNCompleteColumn()) as progress,
    ):
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
    with (
        ends_cleanly(console),
        progress_bars(console, BarColumn(), MofNCompleteColumn()) as progress,
    ):
        cpus = usable_cpus()[: threads or None]
        token_bytes = model_token_bytes(model, dtype_bytes=4)
        chosen = plan(str(model), cpus, token_bytes, restore_bytes, restores)
        windows = run_gap(chosen, out, progress)
    console.print(as_table(chosen, windows))
    console.print(str(machine), highlight=False)
    if json_path is not None:
        write_json(json_path, machine, {"plan": chosen, "windows": windows})
