"""A request's block table, one list of block ids for each group.

The first law in code: whether a step's ids extend a table or replace it is what the scheduler says
of this very step (``resumed_req_ids``), never something remembered. A request that is resumed, or
stands among the new ones, starts a life with tables of its own; all others are appended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class BlockTables:
    """Block ids of one life, by group and position. Owns its lists: the engine reuses its own.

    In process, vLLM's model runner V1 goes on to extend the lists of the scheduler output in place,
    so every list that is kept here is a copy.
    """

    __slots__ = ("_by_group", "complete")

    def __init__(self, block_ids: Sequence[Sequence[int]]) -> None:
        self._by_group: list[list[int]] = [list(ids) for ids in block_ids]
        self.complete: Callable[[], None] | None = None
        """Appends what was handed out and is noted elsewhere, if anything may be."""

    @property
    def by_group(self) -> list[list[int]]:
        """The tables, with all that was handed out so far."""
        if self.complete is not None:
            self.complete()
        return self._by_group
