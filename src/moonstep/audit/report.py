"""Report: a verdict as a table and a list of findings that a person can read."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from moonstep.audit import scenarios
from moonstep.audit.connectors import kit_for
from moonstep.audit.grid import row_of
from moonstep.audit.scenarios.stage import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from moonstep.audit.audit import Verdict
    from moonstep.audit.findings import Finding
    from moonstep.audit.grid import Row
    from moonstep.audit.scenarios.stage import Result

_COLOURS = {
    Status.CLEAN: "green",
    Status.FINDING: "bold red",
    Status.HANG: "bold yellow",
    Status.DEAD: "bold magenta",
    Status.NOT_REACHED: "yellow",
    Status.NOT_APPLICABLE: "dim",
}
_WORST_FIRST = (
    Status.DEAD,
    Status.HANG,
    Status.FINDING,
    Status.NOT_REACHED,
    Status.CLEAN,
    Status.NOT_APPLICABLE,
)
_COLUMNS = ("v1 sync", "v1 async", "v2 sync", "v2 async")


def worst(results: list[Result]) -> Status:
    """The status a cell shows for several shapes."""
    return min((r.status for r in results), key=_WORST_FIRST.index, default=Status.NOT_APPLICABLE)


def column_of(result: Result) -> str:
    """The column of the table a result belongs to."""
    return f"{result.shape.runner} {'async' if result.shape.asynchronous else 'sync'}"


def scenario_table(verdict: Verdict) -> Table:
    """One row a scenario, one column a runner and scheduling; both policies share a cell."""
    table = Table(title="Scenarios (FCFS and priority)", title_justify="left", expand=False)
    table.add_column("scenario", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    cells: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in verdict.results:
        cells[result.scenario, column_of(result)].append(result)
    for scenario in scenarios.ALL:
        if scenario.name not in verdict.order.scenarios:
            continue
        words = [worst(cells[scenario.name, column]) for column in _COLUMNS]
        shown = [
            Text("-" if word is Status.NOT_APPLICABLE else str(word), style=_COLOURS[word])
            for word in words
        ]
        table.add_row(scenario.name, *shown)
    return table


def grid_table(rows: Sequence[Row]) -> Table:
    """One row a cell. Scenario runs and random histories are one figure."""
    table = Table(title="Grid", title_justify="left", box=None)
    table.add_column("cell", no_wrap=True)
    for column in ("runs", "steps", "promised", "findings"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row.refused:
            table.add_row(row.cell.name, "refused", style="dim")
            continue
        figures = row.runs + row.histories, row.steps, row.promised_tokens, row.findings
        style = "bold red" if row.findings else ""
        table.add_row(row.cell.name, *(f"{figure:,}" for figure in figures), style=style)
    return table


def print_grid(console: Console, verdicts: Sequence[Verdict]) -> None:
    """The table, and what a cell was refused for or what was found there."""
    rows = [row_of(verdict) for verdict in verdicts]
    console.print(grid_table(rows))
    refused: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.refused:
            refused[row.refused].append(row.cell.name)
        elif row.is_unproven:
            console.print(f"[yellow]nothing was promised: {row.cell.name}[/]")
    for reason, names in refused.items():
        console.print(f"[dim]refused ({reason}): {', '.join(names)}[/]", highlight=False)
    for verdict in verdicts:
        print_findings(console, verdict)
    note = kit_for(verdicts[0].order.connector.name).note
    if note:
        console.print(note)
    _print_sum(
        console,
        sum(row.findings for row in rows),
        sum(row.not_reached for row in rows),
        sum(verdict.seconds for verdict in verdicts),
    )


def print_finding(console: Console, finding: Finding, where: str) -> None:
    """One finding, with its replay command."""
    who = f" request {finding.request}" if finding.request else ""
    console.print(f"[bold red]{finding.kind}[/] ({where}, step {finding.step}{who})")
    console.print(f"  {finding.detail}", markup=False, highlight=False)
    if finding.replay:
        console.print(f"  replay: {finding.replay}", markup=False, highlight=False, soft_wrap=True)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """All of it."""
    if verdict.results:
        console.print(scenario_table(verdict))
        _print_reasons(console, verdict)
    if verdict.histories:
        _print_random(console, verdict)
    print_findings(console, verdict)
    note = kit_for(verdict.order.connector.name).note
    if note:
        console.print(note)
    _print_sum(console, verdict.finding_count, verdict.not_reached_count, verdict.seconds)


def _print_sum(console: Console, findings: int, not_reached: int, seconds: float) -> None:
    style = "bold red" if findings else "bold green"
    console.print(f"[{style}]{findings} findings[/] in {seconds:.0f} s")
    if not_reached:
        console.print(f"[yellow]{not_reached} scenarios not reached[/]")


def print_findings(console: Console, verdict: Verdict) -> None:
    """Those of scenarios, one of a sort, and those of random histories with their histories."""
    cell = f" in {verdict.order.place}" if verdict.order.cell else ""
    for result in _first_of_each(verdict.results):
        if result.finding is not None:
            where = f"{result.scenario}, {result.shape.label()} {result.variant}".rstrip()
            print_finding(console, result.finding, where + cell)
    for found in verdict.random_findings:
        print_finding(console, found.finding, f"seed {found.seed}, {found.shape}{cell}")
        if found.short is not None:
            console.print(found.short.to_text(), markup=False, highlight=False, soft_wrap=True)


def _first_of_each(results: list[Result]) -> list[Result]:
    """The first finding of each scenario and kind: the others say the same in other shapes."""
    seen: set[tuple[str, str]] = set()
    first = []
    for result in results:
        if result.finding is None:
            continue
        key = (result.scenario, str(result.finding.kind))
        if key not in seen:
            seen.add(key)
            first.append(result)
    return first


def _print_reasons(console: Console, verdict: Verdict) -> None:
    reasons: dict[str, set[str]] = defaultdict(set)
    for result in verdict.results:
        if result.status is Status.NOT_APPLICABLE:
            reasons[result.reason].add(result.scenario)
    for reason, names in reasons.items():
        console.print(f"[dim]does not apply ({reason}): {', '.join(sorted(names))}[/]")


def _print_random(console: Console, verdict: Verdict) -> None:
    counts = verdict.counts
    console.print(
        f"Random histories: {verdict.histories:,} from seed {verdict.order.seed}, "
        f"{counts['steps']:,} steps, {counts['requests']:,} requests, "
        f"{counts['preemptions']:,} preemptions, {counts['aborted']:,} aborts, "
        f"{counts['resets']:,} resets, "
        f"{counts['sync_loads'] + counts['async_loads']:,} loads of "
        f"{counts['loaded_tokens']:,} tokens, {counts['kept_compared']:,} kept blocks compared"
    )
    if counts["refused"]:
        console.print(f"{counts['refused']:,} of them were refused by the connector at start")
