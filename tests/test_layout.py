"""The rules of the house: who imports whom, how long things are, and that the map is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "moonstep"

MOST_LINES_A_FILE = 400
MOST_LINES_A_FUNCTION = 50

# Rooms that may import vLLM and torch: the engine's edge, and the tools that run an engine.
ENGINE_ROOMS = ("engines", "audit", "bench", "demo")
SHARED_MODULES = ("config", "engine", "groups", "keys", "wire")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Every module that ``path`` imports anywhere, also inside functions and for typing only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} uses a relative import"
            found.add(node.module or "")
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body with its docstring; a command's options are its signature, not its code."""
    return (function.end_lineno or 0) - function.body[0].lineno + 1


def is_in(module: str, rooms: tuple[str, ...]) -> bool:
    return any(
        module == f"moonstep.{room}" or module.startswith(f"moonstep.{room}.") for room in rooms
    )


@pytest.mark.parametrize("room", ["scheduler", "worker", "config", "groups", "wire"])
def test_the_core_loads_neither_vllm_nor_torch(room: str) -> None:
    modules = [
        module_name(path)
        for path in sources()
        if is_in(module_name(path), (room,)) and module_name(path) != "moonstep.worker.cuda"
    ]
    assert modules
    code = (
        f"import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"found = {{'vllm', 'torch', 'mooncake'}} & set(sys.modules)\n"
        f"assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_edge_and_the_tools_import_vllm_and_torch() -> None:
    for path in sources():
        module = module_name(path)
        tops = {name.split(".")[0] for name in imported_modules(path)}
        if not is_in(module, ENGINE_ROOMS):
            assert "vllm" not in tops, module
        if not is_in(module, (*ENGINE_ROOMS, "worker.cuda")):
            assert "torch" not in tops, module


@pytest.mark.parametrize(("half", "other"), [("scheduler", "worker"), ("worker", "scheduler")])
def test_the_halves_import_only_the_shared_modules(half: str, other: str) -> None:
    for path in sources():
        if not is_in(module_name(path), (half,)):
            continue
        ours = {name for name in imported_modules(path) if name.startswith("moonstep")}
        assert not {name for name in ours if is_in(name, (other,))}, path
        strangers = {n for n in ours if not is_in(n, (half, *SHARED_MODULES, "stores"))}
        assert not strangers, f"{path} imports {strangers}"


def test_files_stay_short() -> None:
    assert not {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > MOST_LINES_A_FILE
    }


def test_functions_stay_short() -> None:
    assert not {
        f"{path.relative_to(ROOT)}:{function.name}": lines
        for path in sources()
        for function in functions(path)
        if (lines := body_lines(function)) > MOST_LINES_A_FUNCTION
    }


def test_the_map_of_the_rooms_is_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"^\| `src/moonstep/([\w/.]+)` \|", text, flags=re.MULTILINE))
    rooms = {
        str(path.relative_to(PACKAGE)) + ("/" if path.is_dir() else "")
        for pattern in ("*", "engines/*")
        for path in PACKAGE.glob(pattern)
        if path.name not in {"__pycache__", "__init__.py", "py.typed"}
        and (path.is_dir() or path.suffix == ".py")
    }
    assert listed == rooms - {"engines/"}
