"""KV-cache groups: layers of the engine that share one block table.

A group's *kind* decides from which boundaries it can resume, given which of its blocks are
present. Full attention is the only kind that is built; the engine edge refuses every other kind at
start and names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """What a group's layers need in order to go on from a boundary."""

    FULL_ATTENTION = "full attention"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group as both halves see it.

    ``index`` is the engine's number of the group, ``block_tokens`` the tokens of one block and
    ``block_bytes`` its bytes on one rank.
    """

    index: int
    kind: GroupKind
    block_tokens: int
    block_bytes: int
    layer_names: tuple[str, ...]


def last_boundary_tokens(num_tokens: int, block_tokens: int) -> int:
    """The highest block boundary at which a request of ``num_tokens`` tokens may resume.

    The engine has to compute at least the last token itself: a promise of the whole length ends it
    (vLLM 0.32.0, ``Scheduler.schedule``, the assertion on ``num_new_tokens``).

    >>> [last_boundary_tokens(n, 16) for n in (1, 16, 17, 32, 33)]
    [0, 0, 16, 16, 32]
    """
    return (num_tokens - 1) // block_tokens * block_tokens
