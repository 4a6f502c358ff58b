"""What a request leaves at its end and the engine would forget at once.

Of a window only what its last boundary needs; where there are states, they decide, and come named.

Under async scheduling a request's last full block can end without a name: its hash comes with the
very output that ends the request. The engine then frees the block as worthless. It is held by one
reference until the next step has planned its capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonstep.engine import Block, BlockPool
from moonstep.groups import Group, GroupKind, alignment_tokens, block_names, hit_blocks
from moonstep.scheduler.columns import Columns
from moonstep.scheduler.tracker import RequestTracker


class _Hold(NamedTuple):
    columns: Columns
    blocks: list[Block]


class Holds:
    """References to blocks of the engine, from one ``request_finished`` to the next plan."""

    def __init__(self, groups: Sequence[Group]) -> None:
        has_states = any(g.kind is GroupKind.RECURRENT_STATE for g in groups)
        without = (GroupKind.RECURRENT_STATE, *((GroupKind.SLIDING_WINDOW,) * has_states))
        self._groups = [g for g in groups if g.kind not in without]
        self._align_tokens = alignment_tokens(groups)
        self._pool: BlockPool | None = None
        self._holds: list[_Hold] = []
        self._outdated = False

    def __len__(self) -> int:
        return sum(len(hold.blocks) for hold in self._holds)

    def __bool__(self) -> bool:
        return bool(self._holds)

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the one to hold blocks of."""
        self._pool = pool

    def hold(self, tracker: RequestTracker) -> None:
        """Hold the blocks that this ended life filled and that were never looked at.

        Called before the engine frees them. What it scheduled has run before the next capture
        does, so all tokens that are the request's own count.
        """
        if self._pool is None:
            return
        request = tracker.request
        token_len = min(request.num_computed_tokens, request.num_tokens)
        end_tokens = token_len // self._align_tokens * self._align_tokens
        for group in self._groups:
            first, stop = tracker.next_block[group.index], end_tokens // group.block_tokens
            if group.kind is GroupKind.SLIDING_WINDOW:
                first = max(first, hit_blocks(group, end_tokens).start)
            table = tracker.tables.by_group[group.index]
            if not tracker.is_followed:
                first = max(first, self._named_stop(table, stop))
            names = block_names(request.block_hashes, group, first, stop)
            stop = first + len(names)
            if not first < stop <= len(table):
                continue
            columns = Columns(group.index)
            columns.add_run(tracker.life, first, names, table[first:stop])
            blocks = [self._pool.blocks[block] for block in table[first:stop]]
            if not all(block.block_id and block.ref_cnt for block in blocks):
                continue  # a window has left them behind
            self._pool.touch(blocks)
            self._holds.append(_Hold(columns, blocks))

    def _named_stop(self, table: Sequence[int], stop: int) -> int:
        """Where in ``table[:stop]`` the blocks begin that the engine has no name for."""
        blocks = self._pool.blocks if self._pool is not None else ()
        stop = min(stop, len(table))
        while stop and blocks and blocks[table[stop - 1]].block_hash is None:
            stop -= 1
        return stop

    def outdate(self) -> None:
        """The caches were reset: what is held is let go without being kept."""
        self._outdated = True

    def release(self) -> list[Columns]:
        """Let every block go; the blocks to be captured in the step that is being built.

        They can be handed out in the next step at the earliest, and its work comes after this
        step's captures.
        """
        held, outdated = self._holds, self._outdated
        self._holds, self._outdated = [], False
        if self._pool is not None:
            for hold in held:
                self._pool.free_blocks(hold.blocks)
        return [] if outdated else [hold.columns for hold in held]
