"""Runs one engine in a child process and shows how far it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.progress import Progress

from moonstep.demo.process import ChildPlan, EngineFailed, engine_events


def run_engine(
    name: str, plan: ChildPlan, child_module: str, log: Path, progress: Progress
) -> dict[str, Any]:
    """The figures that the child of ``plan`` sends at its end.

    Raises:
        EngineFailed: it did not start or did not finish; no process is left behind.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] | None = None
    task = progress.add_task(f"{name}: starting", total=None)
    try:
        with engine_events(plan, log, child_module) as events:
            for event in events:
                if "figures" in event:
                    figures = event["figures"]
                    continue
                what = f"{name}: {event['phase']}"
                progress.update(task, description=what, completed=event["done"], total=event["of"])
    finally:
        progress.remove_task(task)
    if figures is None:
        raise EngineFailed(f"the engine sent no figures; its log is {log}")
    return figures


def model_token_bytes(model: Path, dtype_bytes: int) -> int:
    """KV bytes of one token of a model, from its configuration.

    Raises:
        ValueError: the folder has no model that this can read.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * heads * size * dtype_bytes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"moonstep: there is no model in {model}: `make setup` makes it"
        ) from error
