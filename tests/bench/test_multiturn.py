"""Conversations on a real engine: what is counted is what was computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from moonstep.bench.engines import model_token_bytes
from moonstep.bench.multiturn import as_table, run_rows
from moonstep.bench.multiturn_plan import rows
from tests.e2e.cpus import own_cpu

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "smollm2-135m"


@pytest.mark.engine
@pytest.mark.drill
@pytest.mark.skipif(not MODEL.is_dir(), reason="the set-up has not made the model")
def test_tokens_computed_and_tokens_cached_are_all_there_are(tmp_path: Path) -> None:
    token_bytes = model_token_bytes(MODEL, dtype_bytes=4)
    listed = rows(str(MODEL), own_cpu(), token_bytes, seed=0, conversations=5, turns=2)
    moonstep = [row for row in listed if row.name.startswith("Moonstep")][:1]
    with Progress(disable=True) as progress:
        (found,) = run_rows(moonstep, tmp_path, progress)
    figures = found.figures
    assert figures.prompt_tokens == 5 * (112 + 112 + 16 + 112)
    assert figures.computed_tokens + figures.reported_cached_tokens == figures.prompt_tokens
    assert figures.reported_cached_tokens > 0, "a second turn finds the first one"
    assert as_table([found]).row_count == 1
