"""What the documents say about settings is what the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moonstep.config import SettingError, Settings

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| (`.+?`|not set) \| .+ \|$", flags=re.MULTILINE)
STORE = "memory://documents"


def rows(document: str) -> dict[str, Any]:
    """Default by name in a document's tables of settings; those not set are left out."""
    found = ROW.findall((ROOT / document).read_text())
    return {
        name: json.loads(text.strip("`")) if text != "not set" else None for name, text in found
    }


def known_settings() -> set[str]:
    """The names that the refusal of an unknown one lists."""
    with pytest.raises(SettingError, match="there are") as refusal:
        Settings.parse({"zzzzzzzz": 1})
    return set(str(refusal.value).split("there are ")[1].split(", "))


def test_the_tables_of_settings_are_complete() -> None:
    assert set(rows("docs/settings.md")) == known_settings()
    assert set(rows("README.md")) <= known_settings()


@pytest.mark.parametrize("document", ["README.md", "docs/settings.md"])
def test_the_defaults_in_the_tables_are_the_defaults(document: str) -> None:
    written = {name: value for name, value in rows(document).items() if value is not None}
    assert written
    assert Settings.parse({**written, "store": STORE}) == Settings.parse({"store": STORE})
    for name in rows(document).keys() - written.keys():
        assert getattr(Settings(), name) is None


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
