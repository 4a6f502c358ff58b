"""The measurement runs, on little: its figures are not looked at here."""

from __future__ import annotations

from pathlib import Path

from moonstep.bench.store import Shape, as_table, measure, timed_start


def test_each_verb_is_measured_with_and_without_checks(tmp_path: Path) -> None:
    shape = Shape("small", 2, 1 << 20)
    found = list(measure(shape, 3, tmp_path, arena_bytes=96 << 20))
    assert {(made.verb, made.store) for made in found} == {
        (verb, store) for verb in ("push", "fetch") for store in ("bare", "checked")
    }
    assert all(made.samples == 3 and made.rate > 0 for made in found)
    assert as_table(found).row_count == 4
    assert list(tmp_path.iterdir()) == []


def test_a_start_is_measured(tmp_path: Path) -> None:
    assert timed_start(tmp_path / "store", 50) > 0
