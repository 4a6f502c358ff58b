"""Scenarios: named cases, each of which asserts that it did exercise what it claims.

They are grouped by module; `ALL` lists them in the order in which reports show them.
"""

from __future__ import annotations

from moonstep.audit.scenarios import hits, hybrid, lives, pressure, stores
from moonstep.audit.scenarios.stage import Scenario

ALL: tuple[Scenario, ...] = (
    *lives.SCENARIOS,
    *pressure.SCENARIOS,
    *hits.SCENARIOS,
    *hybrid.SCENARIOS,
    *stores.SCENARIOS,
)


def by_name(name: str) -> Scenario:
    """The scenario of this name; ValueError, with the names there are, for any other."""
    for scenario in ALL:
        if scenario.name == name:
            return scenario
    raise ValueError(f"no scenario {name!r}; there are: {', '.join(s.name for s in ALL)}")


__all__ = ["ALL", "Scenario", "by_name"]
