"""Replay: a history in a file, with the shape and the connector it was found in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonstep.audit import connectors, driver
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.history import from_text, to_text
from moonstep.audit.shape import Shape

if TYPE_CHECKING:
    from moonstep.audit.history import Event
    from moonstep.audit.shape import Cell, Groups

_MARK = "#! "


@dataclass(frozen=True, slots=True)
class Replay:
    """All that is needed to run a history again."""

    shape: Shape
    connector: ConnectorChoice
    events: tuple[Event, ...]

    def run(self) -> driver.Outcome:
        """Run it."""
        return driver.run_events(self.shape, self.connector, self.events)

    def to_text(self) -> str:
        """As a file: one line of facts, then one event a line."""
        facts: dict[str, Any] = {"shape": self.shape.as_dict(), "connector": asdict(self.connector)}
        return f"{_MARK}{json.dumps(facts)}\n{to_text(self.events)}\n"

    @classmethod
    def from_text(cls, text: str) -> Replay:
        """The reverse of `to_text`; ValueError for a text without a line of facts."""
        first = text.partition("\n")[0]
        if not first.startswith(_MARK):
            raise ValueError(f"a history file begins with {_MARK!r} and facts in JSON")
        facts = json.loads(first.removeprefix(_MARK))
        return cls(
            Shape.from_dict(facts["shape"]),
            ConnectorChoice(**facts["connector"]),
            tuple(from_text(text)),
        )

    def save(self, folder: Path, stem: str) -> Path:
        """Write it to `folder`, which is made if need be; the path of the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}.history"
        path.write_text(self.to_text())
        return path


def of_seed(
    seed: int,
    connector: ConnectorChoice,
    steps: int,
    groups: Groups = "full",
    cell: Cell | None = None,
) -> Replay:
    """The random history of a seed."""
    shape, events = driver.random_history(seed, steps, groups, cell)
    return Replay(shape, connectors.fitted(connector, shape, seed), tuple(events))
