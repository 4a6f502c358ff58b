"""What every end-to-end test needs: the model that the set-up makes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


ENGINE_TIMEOUT_S = 600
"""For a test that starts engines, unless it says otherwise: one core may have to do for both."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


@pytest.fixture(scope="session")
def model() -> Path:
    folder = ROOT / ".cache" / "models" / "smollm2-135m"
    assert (folder / "config.json").is_file(), f"no model in {folder}: run `make setup`"
    return folder


@pytest.fixture(scope="session", autouse=True)
def a_kill_ends_the_servers_too() -> Iterator[None]:
    """SIGTERM leaves the tests as Ctrl-C does: through the blocks that end what was started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)
