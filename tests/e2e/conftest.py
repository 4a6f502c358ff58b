"""What every end-to-end test needs: the model that the set-up makes."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model() -> Path:
    folder = ROOT / ".cache" / "models" / "smollm2-135m"
    assert (folder / "config.json").is_file(), f"no model in {folder}: run `make setup`"
    return folder
