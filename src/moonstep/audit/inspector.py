"""Inspector: an optional window into what a connector keeps.

The bench drives any connector through its hooks alone. A connector whose books
can be read registers an inspector for its class name; the bench then compares
every object that is kept with the oracle, and asks for the books after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Kept:
    """One block that the connector would serve: `block_hash` is the engine's, without group id.

    `payload` is the group's layers in the order of its `layer_names`, each with
    the bytes of the block in memory order.
    """

    group: int
    block_hash: bytes
    rank: int
    payload: bytes


class Inspector(Protocol):
    """What the bench may ask about a connector's inside, between two steps."""

    def kept(self) -> Iterable[Kept]:
        """Every block that a lookup could promise now."""

    def check(self) -> None:
        """Raise `AssertionError` unless the books add up."""

    def idle(self) -> bool:
        """True when no job is open, nothing is pinned and nothing quarantined."""

    def counts(self) -> dict[str, int]:
        """Figures for reports."""


Opener = Callable[[Any, Sequence[Any]], Inspector]
_OPENERS: dict[str, Opener] = {}


def register(class_name: str, opener: Opener) -> None:
    """Let `opener(scheduler_half, worker_halves)` look into connectors of this class name."""
    _OPENERS[class_name] = opener


def inspect(scheduler_half: Any, worker_halves: Sequence[Any]) -> Inspector | None:
    """The inspector for a connector, or None where nobody registered one."""
    opener = _OPENERS.get(type(scheduler_half).__name__)
    return None if opener is None else opener(scheduler_half, worker_halves)
