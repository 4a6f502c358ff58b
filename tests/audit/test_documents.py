"""The audit's page says what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonstep.audit import scenarios
from moonstep.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
EXAMPLE = Path(__file__).with_name("example_connector.py")


def test_the_example_on_the_page_is_the_one_that_is_tested() -> None:
    assert f"```python\n{EXAMPLE.read_text().strip()}\n```" in PAGE.read_text()


def test_every_option_is_on_the_page() -> None:
    page = PAGE.read_text()
    help_text = CliRunner().invoke(app, ["audit", "--help"], env={"COLUMNS": "200"}).stdout
    options = {word for word in help_text.replace("[", " ").split() if word.startswith("--")}
    missing = {option for option in options - {"--help"} if f"`{option}`" not in page}
    assert not missing


def test_scenarios_are_listed() -> None:
    result = CliRunner().invoke(app, ["audit", "--list"])
    assert result.exit_code == 0
    assert all(scenario.name in result.stdout for scenario in scenarios.ALL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scenario", "resum"],
        ["--extra-config", "[]"],
        ["--groups", "half"],
        ["--grid", "full/8"],
        ["--grid", "mla", "--groups", "mla"],
        ["--load-failure-policy", "pray"],
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["audit", *arguments]).exit_code == 2


def test_a_run_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE.parent))
    out = tmp_path / "audit.json"
    result = CliRunner().invoke(
        app,
        [
            "audit", "--connector", "faulty_connectors:LoadsNothing",
            "--scenario", "equal-requests",
            "--steps", "240", "--jobs", "1", "--json", str(out),
        ],
    )  # fmt: skip
    assert result.exit_code == 1, result.stdout
    assert "wrong KV used" in result.stdout
    histories = list(tmp_path.glob("*.history"))
    assert histories, result.stdout
    assert CliRunner().invoke(app, ["audit", "--replay", str(histories[0])]).exit_code == 1
