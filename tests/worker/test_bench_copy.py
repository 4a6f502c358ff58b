"""``moonstep bench copy`` measures what it says it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moonstep.bench import copy as bench


def test_both_directions_at_each_number_of_blocks_that_fits() -> None:
    made = list(bench.measure(bench.Shape("small", 4, 4096), repeats=3, memory_bytes=1 << 20))
    assert [(one.verb, one.blocks) for one in made] == [
        (verb, blocks) for blocks in (1, 4, 8, 16, 32) for verb in ("capture", "restore")
    ]
    for one in made:
        assert one.nbytes == one.blocks * 16384
        assert one.samples == 3
        assert one.rate > 0
        assert one.share_low <= one.share <= one.share_high


def test_a_measurement_copies_every_block_it_counts() -> None:
    """The totals of the worker are those of the samples: no row was bad, nothing was skipped."""
    made = bench.Bench(bench.Shape("small", 4, 4096), memory_bytes=1 << 20, seed=0)
    made.capture(8)
    made.restore(8)
    stats = made._worker.stats
    made.close()
    assert (stats.failed_captures, stats.captured_blocks, stats.restored_blocks) == (0, 63 + 8, 8)


def test_the_command_writes_its_figures_and_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SHAPES", (bench.Shape("small", 4, 4096),))
    monkeypatch.setattr(bench, "MEMORY_BYTES", 1 << 20)
    app = typer.Typer()
    app.command()(bench.copy)
    file = tmp_path / "new" / "copy.json"
    result = CliRunner().invoke(app, ["--repeats", "3", "--json", str(file)])
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["machine"]["cores"] >= 1
    assert len(written["measured"]) == 10
    assert "figures; the lowest is" in result.output
