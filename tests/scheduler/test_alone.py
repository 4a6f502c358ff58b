"""The scheduler half stands alone, and what its docstrings claim is so."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import moonstep
import moonstep.scheduler

CORE = ["moonstep.config", "moonstep.engine", "moonstep.groups", "moonstep.keys", "moonstep.wire"]
SCHEDULER = [
    f"moonstep.scheduler.{module.name}"
    for module in pkgutil.iter_modules(moonstep.scheduler.__path__)
]
SOURCES = Path(moonstep.__file__).parent


def test_the_scheduler_half_imports_neither_torch_nor_vllm_nor_the_other_half() -> None:
    code = (
        f"import sys, {', '.join([*CORE, *SCHEDULER])}\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not roots & {'torch', 'vllm', 'numba', 'mooncake'}, roots\n"
        "assert not [m for m in sys.modules if m.startswith(('moonstep.worker', 'moonstep.st'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("half", ["scheduler", "worker"])
def test_the_halves_never_name_each_other(half: str) -> None:
    other = {"scheduler": "moonstep.worker", "worker": "moonstep.scheduler"}[half]
    for source in (SOURCES / half).rglob("*.py"):
        assert other not in source.read_text(), source


def test_the_rooms_below_the_edge_never_name_vllm() -> None:
    rooms = [*SOURCES.glob("*.py"), *(SOURCES / "scheduler").rglob("*.py")]
    rooms += (SOURCES / "worker").rglob("*.py")
    for source in rooms:
        lines = source.read_text().splitlines()
        imports = [line for line in lines if line.strip().startswith(("import ", "from "))]
        assert not [line for line in imports if "vllm" in line.split()[1]], source


@pytest.mark.parametrize("name", [*CORE, *SCHEDULER])
def test_what_the_docstrings_show_is_what_happens(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_there_are_examples_at_all() -> None:
    attempted = sum(
        doctest.testmod(importlib.import_module(name)).attempted for name in [*CORE, *SCHEDULER]
    )
    assert attempted >= 8
