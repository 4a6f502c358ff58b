"""What the documents say about settings is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moonstep.config import SettingError, Settings

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", flags=re.MULTILINE)


def rows() -> dict[str, str]:
    section = (ROOT / "README.md").read_text().split("## Settings")[1].split("\n## ")[0]
    return dict(ROW.findall(section))


def known_settings() -> set[str]:
    """The names that the refusal of an unknown one lists."""
    with pytest.raises(SettingError, match="there are") as refusal:
        Settings.parse({"zzzzzzzz": 1})
    return set(str(refusal.value).split("there are ")[1].split(", "))


def test_the_table_of_settings_is_complete() -> None:
    assert set(rows()) == known_settings()


def test_the_defaults_in_the_table_are_the_defaults() -> None:
    written = {name: text.strip('"') for name, text in rows().items()}
    values = {name: int(text) if text.isdigit() else text for name, text in written.items()}
    assert Settings.parse(values) == Settings()


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
