"""Blocks of one group by the hundred: the columns of one table, filtered and extended together.

A prompt of a million tokens fills 65,536 blocks of 16. One object for each of them costs more than
everything else that is done with them, so they travel as columns, and only this class takes rows
out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from moonstep.engine import BlockHash

BlockKey = bytes
"""Block hash and group index (4 bytes, big-endian) as one, as the engine's pool writes it."""

Numbers = npt.NDArray[np.int64]
"""Slots, blocks, lives or depths, when something is done with all of them at once."""

NONE: Final[Numbers] = np.zeros(0, dtype=np.int64)

_GROUP_BYTES = 4


def numbers(values: Sequence[int] | Numbers) -> Numbers:
    """The values as an array; what is one already stays as it is.

    >>> numbers([3, 1]).tolist()
    [3, 1]
    """
    if isinstance(values, np.ndarray):
        return values
    return np.fromiter(values, np.int64, len(values))


def key_suffix(group: int) -> bytes:
    """What the pool writes behind a block hash (vLLM ``make_block_hash_with_group_id``)."""
    return group.to_bytes(_GROUP_BYTES, "big")


def keys_of(names: Sequence[BlockHash], groups: Sequence[int] | None) -> list[BlockKey]:
    """Names as the engine's pool writes them, each of the group beside it, or all of the only one.

    >>> keys_of([b"a", b"b"], [0, 2]), keys_of([b"c"], None)
    ([b'a\\x00\\x00\\x00\\x00', b'b\\x00\\x00\\x00\\x02'], [b'c\\x00\\x00\\x00\\x00'])
    """
    if groups is None:
        suffix = key_suffix(0)
        return [name + suffix for name in names]
    suffixes = [key_suffix(group) for group in range(max(groups, default=0) + 1)]
    return [name + suffixes[group] for name, group in zip(names, groups, strict=True)]


def group_of_key(key: BlockKey) -> int:
    """The group that a key names.

    >>> group_of_key(b"name" + key_suffix(3))
    3
    """
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


@dataclass(slots=True)
class Columns:
    """Blocks of ``group``: whose life they stand in, how deep, their name, the engine's block."""

    group: int
    lives: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    names: list[BlockHash] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    def add(self, life: int, depth: int, name: BlockHash, block: int) -> None:
        """One more block."""
        self.lives.append(life)
        self.depths.append(depth)
        self.names.append(name)
        self.blocks.append(block)

    def add_run(
        self, life: int, first: int, names: Sequence[BlockHash], blocks: Sequence[int]
    ) -> None:
        """Consecutive blocks of one life, the first of them ``first`` blocks deep."""
        count = len(names)
        self.lives.extend(repeat(life, count))
        self.depths.extend(range(first, first + count))
        self.names.extend(names)
        self.blocks.extend(blocks)

    def only(self, wanted: Iterable[bool]) -> Columns:
        """The rows for which ``wanted`` is true."""
        keep = list(wanted)
        return Columns(
            self.group,
            list(compress(self.lives, keep)),
            list(compress(self.depths, keep)),
            list(compress(self.names, keep)),
            list(compress(self.blocks, keep)),
        )

    def first_of_each(self) -> Columns:
        """The rows whose name stands there for the first time.

        >>> Columns(0, [1, 1, 2], [0, 1, 0], [b"a", b"b", b"a"], [5, 6, 7]).first_of_each().blocks
        [5, 6]
        """
        row_of = dict(zip(reversed(self.names), range(len(self) - 1, -1, -1), strict=True))
        return self.only(row_of[name] == row for row, name in enumerate(self.names))

    @property
    def suffix(self) -> bytes:
        return key_suffix(self.group)

    def by_depth(self) -> Columns:
        """The same rows, shallowest first."""
        depths = numbers(self.depths)
        order = np.argsort(depths, kind="stable")
        return Columns(
            self.group,
            numbers(self.lives)[order].tolist(),
            depths[order].tolist(),
            np.fromiter(self.names, object, len(self))[order].tolist(),
            numbers(self.blocks)[order].tolist(),
        )

    def part(self, start: int, stop: int) -> Columns:
        """The rows ``[start, stop)``."""
        return Columns(
            self.group,
            self.lives[start:stop],
            self.depths[start:stop],
            self.names[start:stop],
            self.blocks[start:stop],
        )

    def keys(self) -> list[BlockKey]:
        """The names as the engine's pool writes them."""
        suffix = self.suffix
        return [name + suffix for name in self.names]
