"""Who vouches for a block: the engine's pool says its name, and we saw a step compute it.

A block carries its hash from allocation on, before it is computed, and keeps it when it is freed:
a hash alone proves nothing. So two witnesses have to agree before a block is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import eq
from typing import Final

import numpy as np

from moonstep.engine import BlockHash, BlockPool
from moonstep.scheduler.columns import BlockKey, Columns, Numbers, key_suffix, numbers

NOBODY: Final = 0
"""The source of blocks of which nothing is known."""

_SHIFT: Final = 32
_DEPTH: Final = (1 << _SHIFT) - 1
_FEWEST_ENDED: Final = 256
_FEWEST_NAMES: Final = 1 << 14

Names = Sequence[BlockHash] | dict[int, BlockHash]


@dataclass(slots=True)
class _Source:
    """Whose blocks are noted: the names of a life's, every ``units``-th; or some, by depth.

    Blocks from the depth ``first`` on are the life's own. While it goes on, ``names`` are all its
    request's, a list that grows; once it has ended, those from ``offset`` on.
    """

    life: int
    group: int
    names: Names
    units: int = 1
    first: int = 0
    offset: int = 0

    def names_at(self, depths: Sequence[int]) -> Iterable[BlockHash | None]:
        """The names of the blocks at these depths, as far as they have one by now."""
        names, units = self.names, self.units
        if isinstance(names, dict):
            return map(names.get, depths)
        if self.offset:
            depths = [depth - self.offset for depth in depths]
        if units == 1 and max(depths) < len(names):
            return map(names.__getitem__, depths)
        ends = [(depth + 1) * units - 1 for depth in depths]
        return [names[end] if end < len(names) else None for end in ends]

    def let_go(self, stop: int | None) -> None:
        """The life has ended: of its request's names only its own up to ``stop`` are kept."""
        names, units = self.names, self.units
        if not isinstance(names, dict):
            last = len(names) if stop is None else stop * units
            self.names = names[(self.first + 1) * units - 1 : last : units]
            self.units, self.offset = 1, self.first


class Witness:
    """Under which name each of the engine's blocks was computed, as far as we saw it scheduled.

    A block is noted once, when it is handed out: whose it is (its *source*) and how deep it stands
    there. The source knows the names. Nothing is to be done when the block is computed; what a life
    had not computed when it ended is taken back. So of a block that is nobody's at the moment, and
    only such a block can be lost, what is noted is what was computed into it.
    """

    def __init__(self) -> None:
        # By block: source and depth in one number, so a block costs one touch of memory.
        self._of: Numbers = np.zeros(0, dtype=np.int64)
        self._sources: list[_Source] = [_Source(0, -1, {})]  # the first is nobody
        self._ended: list[int] = []  # get no more blocks, and may have none any more
        self._free: list[int] = []
        self._sweep_at = _FEWEST_ENDED
        self._ended_names = 0  # how many names they keep
        self._sweep_at_names = _FEWEST_NAMES
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool as the first witness."""
        self._pool = pool
        self._reserve(len(pool.blocks))

    def begin(self, life: int, group: int, names: Names, units: int = 1, first: int = 0) -> int:
        """A source of a life's blocks of ``group``, until ``end``; ``names`` may grow.

        None of them stands before the depth ``first``.
        """
        source = _Source(life, group, names, units, first)
        if self._free:
            number = self._free.pop()
            self._sources[number] = source
            return number
        self._sources.append(source)
        return len(self._sources) - 1

    def end(self, source: int, uncomputed: Sequence[int], stop: int | None = None) -> None:
        """A life has ended, and has not computed these of its blocks: those from ``stop`` on.

        Its request's list of names is let go, since most of it may be a prefix that others share.
        """
        if source == NOBODY:
            return
        if uncomputed:
            at = numbers(uncomputed)
            self._of[at[self._of[at] >> _SHIFT == source]] = NOBODY
        ended = self._sources[source]
        ended.let_go(stop)
        self._ended.append(source)
        self._ended_names += len(ended.names)
        if len(self._ended) >= self._sweep_at or self._ended_names >= self._sweep_at_names:
            self._sweep()

    def saw_allocated(
        self,
        blocks: Sequence[int] | Numbers,
        sources: Sequence[int] | Numbers | int = NOBODY,
        depths: Sequence[int] | Numbers = (),
    ) -> None:
        """These blocks were handed out anew: what they held is about to be overwritten.

        By what the source beside each of them, or that of all, has at the depth beside it.
        """
        if not len(blocks):
            return
        at = self._places(blocks)
        if isinstance(sources, int):
            self._of[at] = (sources << _SHIFT) + numbers(depths) if sources else NOBODY
        else:
            whose = numbers(sources)
            self._of[at] = (whose << _SHIFT) + numbers(depths)

    def saw_computed(self, columns: Columns) -> None:
        """A step that fills these blocks is scheduled, by computing or restoring."""
        of_life: dict[int, dict[int, BlockHash]] = {}
        for life, depth, name in zip(columns.lives, columns.depths, columns.names, strict=True):
            of_life.setdefault(life, {})[depth] = name
        source_of = {life: self.begin(life, columns.group, at) for life, at in of_life.items()}
        sources = [source_of[life] for life in columns.lives]
        self.saw_allocated(columns.blocks, sources, columns.depths)
        for source in source_of.values():
            self.end(source, ())

    def pool_agrees(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> bool:
        """Whether the engine's pool knows each of ``blocks`` by the key beside it.

        Without prefix caching the engine keeps no hash; then the request's table of this step,
        from which the caller has the blocks, is the first witness.
        """
        pool = self._pool
        if pool is None or not pool.enable_caching:
            return True
        pool_blocks = pool.blocks
        return [pool_blocks[block].block_hash for block in blocks] == keys

    def name_of(self, block: int) -> BlockKey | None:
        """What the engine's pool knows ``block`` by, if anything."""
        pool = self._pool
        return pool.blocks[block].block_hash if pool is not None and pool.enable_caching else None

    def is_named(self, block: int, key: BlockKey, *, in_use: bool = False) -> bool:
        """Whether the pool knows ``block`` by ``key``, and some request holds it if ``in_use``."""
        pool = self._pool
        return (
            pool is not None
            and self.name_of(block) == key
            and (not in_use or pool.blocks[block].ref_cnt > 0)
        )

    def vouched(self, columns: Columns, keys: Sequence[BlockKey]) -> Columns:
        """Those of the blocks that hold what is beside them, in this step, by both witnesses."""
        seen = self._seen_as(columns.group, columns.blocks, columns.names)
        named = [self.pool_agrees((b,), [k]) for b, k in zip(columns.blocks, keys, strict=True)]
        return columns.only(s and n for s, n in zip(seen, named, strict=True))

    def computed(self, group: int, blocks: Sequence[int], keys: Sequence[BlockKey]) -> Columns:
        """Those of ``blocks`` of ``group`` that were seen computed as the key beside them.

        None of them may be in the table of a life under way.
        """
        name_bytes = -len(key_suffix(group))
        names = [key[:name_bytes] for key in keys]
        agreed = self._seen_as(group, blocks, names)
        if not all(agreed):
            blocks, names = list(compress(blocks, agreed)), list(compress(names, agreed))
        if not blocks:
            return Columns(group)
        of = self._of[self._places(blocks)]
        sources = self._sources
        lives = [sources[source].life for source in (of >> _SHIFT).tolist()]
        return Columns(group, lives, (of & _DEPTH).tolist(), names, list(blocks))

    def forget(self) -> None:
        """Nothing computed so far counts any more: the caches were reset.

        The sources are gone as well: nobody has to end them.
        """
        self._of.fill(NOBODY)
        del self._sources[NOBODY + 1 :]
        self._ended.clear()
        self._free.clear()
        self._ended_names = 0

    def _seen_as(self, group: int, blocks: Sequence[int], names: Sequence[BlockHash]) -> list[bool]:
        """Whether each block is noted under the name beside it."""
        if not blocks:
            return []
        of = self._of[self._places(blocks)]
        whose, depths = of >> _SHIFT, (of & _DEPTH).tolist()
        # Most come by the run, as their requests left them.
        stops = [*(np.flatnonzero(np.diff(whose)) + 1).tolist(), len(depths)]
        seen: list[bool] = []
        start = 0
        for stop in stops:
            source = self._sources[int(whose[start])]
            if source.group == group:
                seen += map(eq, source.names_at(depths[start:stop]), names[start:stop])
            else:
                seen += [False] * (stop - start)
            start = stop
        return seen

    def _sweep(self) -> None:
        """Let go of ended sources of which no block is left, and of most names of blocks that left.

        So what ended sources keep is bounded by the pool, not by the contexts that went through it.
        """
        block_counts = np.bincount(self._of >> _SHIFT, minlength=len(self._sources)).tolist()
        ended, self._ended = self._ended, []
        for source in ended:
            if block_counts[source]:
                self._ended.append(source)
            else:
                self._sources[source] = self._sources[NOBODY]
                self._free.append(source)
        self._narrow([s for s in self._ended if len(self._sources[s].names) > 2 * block_counts[s]])
        # As many lives later: what a sweep costs is a few microseconds for each of them.
        self._sweep_at = 2 * len(self._ended) + max(_FEWEST_ENDED, len(self._of) >> 10)
        self._ended_names = sum(len(self._sources[source].names) for source in self._ended)
        self._sweep_at_names = self._ended_names + max(_FEWEST_NAMES, len(self._of))

    def _narrow(self, wide: Sequence[int]) -> None:
        """Keep only those names of these sources whose blocks are still noted."""
        if not wide:
            return
        is_wide = np.zeros(len(self._sources), dtype=np.bool_)
        is_wide[wide] = True
        of = self._of[is_wide[self._of >> _SHIFT]]
        depths_of: dict[int, list[int]] = {source: [] for source in wide}
        for source, depth in zip((of >> _SHIFT).tolist(), (of & _DEPTH).tolist(), strict=True):
            depths_of[source].append(depth)
        for number, depths in depths_of.items():
            source = self._sources[number]
            names = zip(depths, source.names_at(depths), strict=True)
            source.names = {depth: name for depth, name in names if name is not None}

    def _places(self, blocks: Sequence[int] | Numbers) -> Numbers:
        """The blocks' places in what is noted; there is room for every block of the pool."""
        at = numbers(blocks)
        if self._pool is None:
            self._reserve(int(at.max()) + 1)
        return at

    def _reserve(self, block_count: int) -> None:
        """Make room for what is known of so many blocks."""
        missing = block_count - len(self._of)
        if missing > 0:
            room = np.zeros(max(missing, len(self._of)), dtype=np.int64)
            self._of = np.append(self._of, room)
