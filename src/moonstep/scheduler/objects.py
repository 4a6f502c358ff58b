"""Objects of a store: which blocks of a prefix each of them is made of.

Full attention is kept in runs of equal length, one behind the other. A window is one object for
each boundary at which it is kept, the blocks that cover it there; a state is one block. A store's
hits end where runs end, so that is where windows and states are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moonstep.engine import BlockHash
from moonstep.groups import Group, GroupKind, alignment_tokens, block_names, hit_blocks


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """How long the objects of a group are: ``blocks`` blocks at most, the last one names it."""

    group: Group
    blocks: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.group.block_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of one object on one rank."""
        return self.blocks * self.group.block_bytes


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """One object of a prefix: its number in it, its blocks' names, the name of the one before.

    ``first`` is where its first block stands in the prefix.
    """

    number: int
    names: tuple[BlockHash, ...]
    parent: BlockHash | None
    first: int = 0

    @property
    def name(self) -> BlockHash:
        return self.names[-1]


def object_shape(group: Group, chunk_tokens: int) -> ObjectShape:
    """Full attention: about ``chunk_tokens`` tokens, at least one block; else what a hit needs.

    >>> group = Group(0, GroupKind.FULL_ATTENTION, 128, 1, ())
    >>> [object_shape(group, tokens).blocks for tokens in (64, 256, 300)]
    [1, 2, 2]
    """
    if group.kind is GroupKind.FULL_ATTENTION:
        return ObjectShape(group, max(1, chunk_tokens // group.block_tokens))
    return ObjectShape(group, max(1, group.window_blocks) + group.proof_blocks)


def objects_of(
    shape: ObjectShape, hashes: Sequence[BlockHash], first: int, stop: int
) -> list[ObjectNames]:
    """The whole objects of full attention numbered ``[first, stop)`` of the prefix so hashed.

    >>> shape = ObjectShape(Group(0, GroupKind.FULL_ATTENTION, 16, 1, ()), 2)
    >>> [(o.names, o.parent) for o in objects_of(shape, [b"a", b"b", b"c", b"d", b"e"], 0, 9)]
    [((b'a', b'b'), None), ((b'c', b'd'), b'b')]
    """
    size, group = shape.blocks, shape.group
    names = block_names(hashes, group, first * size, stop * size)
    objects: list[ObjectNames] = []
    if not names:
        return objects
    parent = hashes[first * size * group.units - 1] if first else None
    for start in range(0, len(names) - size + 1, size):
        run = tuple(names[start : start + size])
        objects.append(ObjectNames(first + start // size, run, parent, first * size + start))
        parent = run[-1]
    return objects


def object_at(
    shape: ObjectShape, hashes: Sequence[BlockHash], boundary_tokens: int, unit_tokens: int
) -> ObjectNames | None:
    """The object of a window or a state at a boundary; ``None`` if its blocks are not all hashed.

    It is numbered like the run that ends there, of ``unit_tokens``, and has nothing before it.

    >>> window = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
    >>> object_at(object_shape(window, 0), [b"a", b"b", b"c", b"d"], 64, 32)
    ObjectNames(number=1, names=(b'c', b'd'), parent=None, first=2)
    """
    needed = hit_blocks(shape.group, boundary_tokens)
    names = block_names(hashes, shape.group, needed.start, needed.stop)
    if not names or len(names) < len(needed):
        return None
    return ObjectNames(boundary_tokens // unit_tokens - 1, tuple(names), None, needed.start)


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """The objects of all groups of an engine, and where a store's hits end."""

    dense: tuple[ObjectShape, ...]
    """Of full attention, in runs."""
    sparse: tuple[ObjectShape, ...]
    """Of windows and states."""
    unit_tokens: int
    """Hits end at multiples of this."""

    @classmethod
    def of(cls, groups: Sequence[Group], chunk_tokens: int) -> ObjectPlan:
        """Objects of full attention of about ``chunk_tokens`` tokens, and what goes with them.

        >>> full = Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())
        >>> state = Group(1, GroupKind.RECURRENT_STATE, 48, 1, (), hash_tokens=16)
        >>> ObjectPlan.of([full, state], 64).unit_tokens, ObjectPlan.of([state], 64).unit_tokens
        (192, 48)
        """
        shapes = [object_shape(group, chunk_tokens) for group in groups]
        dense = tuple(s for s in shapes if s.group.kind is GroupKind.FULL_ATTENTION)
        sparse = tuple(s for s in shapes if s.group.kind is not GroupKind.FULL_ATTENTION)
        align = alignment_tokens(groups)
        whole = [s.tokens for s in dense] or [max(align, chunk_tokens // align * align)]
        return cls(dense, sparse, math.lcm(align, *whole))

    @property
    def hash_tokens(self) -> int:
        """The engine's hash unit."""
        return self.shapes[0].group.hash_tokens

    @property
    def most_blocks(self) -> int:
        """Blocks of the largest object."""
        return max(shape.blocks for shape in self.shapes)

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest object, on one rank."""
        return max(shape.nbytes for shape in self.shapes)

    @property
    def shapes(self) -> tuple[ObjectShape, ...]:
        return self.dense + self.sparse

    def below(self, tokens: int) -> int:
        """The highest boundary at or below ``tokens`` at which a store's hit can end."""
        return tokens // self.unit_tokens * self.unit_tokens

    def at(self, hashes: Sequence[BlockHash], boundary_tokens: int) -> Iterator[WantedObject]:
        """The objects of windows and states at a boundary, as far as they are hashed."""
        for shape in self.sparse:
            names = object_at(shape, hashes, boundary_tokens, self.unit_tokens)
            if names is not None:
                yield WantedObject(shape, names)


@dataclass(frozen=True, slots=True)
class WantedObject:
    """An object, and of which group."""

    shape: ObjectShape
    names: ObjectNames

    @property
    def mark(self) -> tuple[int, BlockHash]:
        """Group and name: what tells it from every other object."""
        return self.shape.group.index, self.names.name


def all_of(shape: ObjectShape, objects: Iterable[ObjectNames]) -> list[WantedObject]:
    """These objects, all of one group."""
    return [WantedObject(shape, names) for names in objects]
