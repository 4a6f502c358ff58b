"""Where measurements go: one JSON file each, with the machine they were made on."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Any

from moonstep.bench.machine import Machine


def write_json(path: Path, machine: Machine, content: dict[str, Any]) -> None:
    """Write ``content``, dataclasses and enums included, after the facts of ``machine``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine, **content}
    path.write_text(json.dumps(whole, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no form in JSON")
