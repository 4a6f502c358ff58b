"""The examples in the docstrings hold, and the worker half imports neither torch nor vLLM."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest

MODULES = [
    "moonstep.worker.pieces",
    "moonstep.worker.rows",
    "moonstep.worker.worker",
    "moonstep.engines.vllm.layout",
    "moonstep.bench.copy",
    "moonstep.bench.machine",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_worker_half_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, moonstep.worker.worker\n"
        "assert not {'torch', 'vllm', 'moonstep.scheduler'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
