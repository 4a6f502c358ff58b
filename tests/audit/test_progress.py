"""Progress of a long run: no terminal, so a line now and then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moonstep.cli.progress import Lines, progress


def test_a_line_a_minute_says_how_far_it_is() -> None:
    lines: list[str] = []
    now_s = 100.0
    said = Lines(lines.append, lambda: now_s, every_s=60.0)
    for now_s in (101.0, 159.0, 160.0, 161.0, 219.0, 290.0):
        said.told("scenarios", int(now_s), 200)
    assert lines == ["1 min: scenarios, 160 of 200\n", "3 min: scenarios, 200 of 200\n"]


def test_what_is_short_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with progress(Console(file=shown)) as told:
        told("scenarios", 1, 2)
    assert (shown.getvalue(), *capsys.readouterr()) == ("", "", "")


def test_a_terminal_shows_a_bar() -> None:
    shown = io.StringIO()
    with progress(Console(file=shown, force_terminal=True, width=100)) as told:
        told("scenarios", 1, 2)
    assert "scenarios" in shown.getvalue()
