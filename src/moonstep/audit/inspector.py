"""Inspector: an optional window into what a connector keeps.

The bench drives any connector through its hooks alone. A connector whose books can be read gets
an inspector by its class name (`moonstep.audit.connectors`); the bench then compares every object
that is kept with the oracle, and asks for the books after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Kept:
    """One block that the connector would serve: `block_hash` is the engine's, without group id.

    `read` gives the group's layers in the order of its `layer_names`, each with the bytes of
    the block in memory order; of several `blocks`, one after the other, the hash is that of the
    last. `stamp` changes whenever the bytes may have; `source` tells places of one connector apart.
    """

    group: int
    block_hash: bytes
    rank: int
    stamp: int
    read: Callable[[], bytes]
    blocks: int = 1
    source: str = ""


class Inspector(Protocol):
    """What the bench may ask about a connector's inside, between two steps."""

    def kept(self) -> Iterable[Kept]:
        """Every block that a lookup could promise now."""

    def check(self, running: Collection[str]) -> None:
        """Raise `AssertionError` unless the books add up; `running` are the ids that run now."""

    def idle(self) -> bool:
        """True when no job is open, nothing is pinned and nothing quarantined."""

    def counts(self) -> dict[str, int]:
        """Figures for reports."""
