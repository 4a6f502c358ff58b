"""The demo from start to end: engines one after the other, then the verdicts."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moonstep.bench.machine import machine_facts
from moonstep.bench.outcome import write_json
from moonstep.demo.figures import Check, EngineFigures, StoreFigures, checks, store_checks
from moonstep.demo.plan import DemoPlan, usable_cpus
from moonstep.demo.process import EngineFailed, engine_events
from moonstep.demo.report import print_checks, print_figures

_STORE_PROMPTS: Final = 3
"""Fewer than elsewhere: two more engines start, and the demo is to stay short."""


def run_demo(model: Path, out: Path, console: Console) -> list[Check]:
    """Measure, show and write ``out/demo.json``. The engines' logs lie beside it.

    Raises:
        EngineFailed: an engine did not start or did not finish; no process is left behind.
    """
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    cpus, machine = usable_cpus(), machine_facts()
    # Without a connector a prompt that comes back is a new one, which has been measured: once will
    # do to show it, and the demo is to stay short.
    with_it = DemoPlan(str(model), with_moonstep=True, cpus=cpus)
    without = dataclasses.replace(with_it, with_moonstep=False, return_count=1, gap_returns=1)
    plans = {"no connector": without, "Moonstep": with_it}
    raw = {
        name: _measure(name, plan, out / f"demo-{name.lower().replace(' ', '-')}.log", console)
        for name, plan in plans.items()
    }
    plain, ours = (EngineFigures.from_raw(figures) for figures in raw.values())
    raw_stored = _measure_store(plans["Moonstep"], out, console)
    stored = StoreFigures.from_raw(*raw_stored.values())
    verdicts = [*checks(plain, ours), *store_checks(stored)]
    seconds = time.perf_counter() - start
    print_figures(console, plans["Moonstep"], plain, ours, stored)
    print_checks(console, verdicts)
    write_json(
        out / "demo.json",
        machine,
        {
            "seconds": seconds,
            "settings": {name: plan.to_json() for name, plan in plans.items()},
            "figures": {"no connector": plain, "Moonstep": ours, "store": stored},
            "checks": verdicts,
            "raw": {**raw, **raw_stored},
        },
    )
    console.print(str(machine), highlight=False)
    console.print(f"{seconds:.0f} s in all; figures: {out / 'demo.json'}")
    return verdicts


def _measure_store(plan: DemoPlan, out: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Two engine processes, one after the other, on a directory that starts empty."""
    with tempfile.TemporaryDirectory(prefix="store-", dir=out) as folder:
        path = quote(str(Path(folder).resolve() / "cache"))
        with_store = dataclasses.replace(
            plan, store=f"dir://{path}?capacity=2GiB", prompt_count=_STORE_PROMPTS
        )
        return {
            name: _measure(name, with_store, out / f"demo-{name.replace(' ', '-')}.log", console)
            for name in ("directory", "after a restart")
        }


def _measure(name: str, plan: DemoPlan, log: Path, console: Console) -> dict[str, Any]:
    figures: dict[str, Any] | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, engine_events(plan, log) as events:
        task = None
        phase = ""
        for event in events:
            if "figures" in event:
                figures = event["figures"]
            elif event["phase"] != phase:
                if task is not None:
                    _finish(progress, task)
                phase = event["phase"]
                task = progress.add_task(f"{name}: {phase}", total=event["of"])
            elif task is not None:
                progress.update(task, completed=event["done"])
        if task is not None and figures is not None:
            _finish(progress, task)
    if figures is None:
        raise EngineFailed(f"the engine sent no figures; its log is {log}")
    return figures


def _finish(progress: Progress, task: Any) -> None:
    progress.update(task, completed=progress.tasks[task].total)
    progress.stop_task(task)
