"""The demo's tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moonstep.demo.figures import Check, EngineFigures, StoreFigures
from moonstep.demo.plan import DemoPlan


def print_figures(
    console: Console,
    plan: DemoPlan,
    plain: EngineFigures,
    ours: EngineFigures,
    stored: StoreFigures,
) -> None:
    """Show both engines side by side, and what the engine that came after them found."""
    table = Table(
        title=f"{plan.prompt_count} prompts of {plan.prompt_tokens:,} tokens, {plan.dtype}"
    )
    table.add_column("")
    table.add_column("no connector", justify="right")
    table.add_column("Moonstep", justify="right")
    for name, attribute, as_text in (
        ("first token, prompt seen for the first time", "first_visit_s", _ms),
        ("first token, prompt pushed out by others", "return_s", _ms),
        ("first token, prompt still in KV memory (the floor)", "repeat_s", _ms),
        ("another request's token gap meanwhile, median", "gap_median_s", _ms),
        ("another request's token gap meanwhile, worst", "gap_worst_s", _ms),
        ("... worst, for a prompt still in KV memory", "gap_floor_s", _ms),
        (f"storm of {plan.storm_requests} requests, time", "storm_s", _s),
        ("storm, preemptions", "preemptions", _count),
        ("storm, tokens restored", "storm_restored_tokens", _count),
    ):
        table.add_row(name, as_text(getattr(plain, attribute)), as_text(getattr(ours, attribute)))
    table.add_row("first token, new engine, prompt in a directory", "-", _ms(stored.warm_s))
    console.print(table)
    mib = ours.restored_bytes / (1 << 20)
    rate = ours.memcpy_bytes_per_s / 1e9
    console.print(
        f"A returning prompt restores {mib:.0f} MiB; memcpy in this run: {rate:.1f} GB/s."
    )


def print_checks(console: Console, verdicts: list[Check]) -> None:
    """Show each promise with its bound, and whether this run kept it."""
    table = Table()
    for heading in ("check", "value", "bound", ""):
        table.add_column(heading, justify="left" if heading == "check" else "right")
    for check in verdicts:
        verdict = "[green]holds[/]" if check.holds else "[red]fails[/]"
        value, bound = (f"{number:,.4g} {check.unit}" for number in (check.value, check.bound))
        table.add_row(check.name, value, bound, verdict)
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _count(number: int) -> str:
    return f"{number:,}"
