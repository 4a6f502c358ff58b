"""Objects of a store: which blocks of a prefix each of them is made of.

Full attention is kept in runs of equal length, one behind the other. Where a prefix ends inside a
run, its last blocks are a shorter object, the *tail*. Like a run it is named by the hash at its
end, which tells its length: it begins where the run does. A window is one object for each boundary
at which it is kept, the blocks that cover it there; a state is one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

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


def tail_of(shape: ObjectShape, hashes: Sequence[BlockHash], end_tokens: int) -> ObjectNames | None:
    """What is left behind the last whole object of full attention of a prefix that ends there.

    ``None`` if nothing is, or if not all of it is hashed. With drafts the block that proves the end
    belongs to the prefix.

    >>> shape = ObjectShape(Group(0, GroupKind.FULL_ATTENTION, 16, 1, ()), 3)
    >>> tail_of(shape, [b"a", b"b", b"c", b"d", b"e"], 80)
    ObjectNames(number=1, names=(b'd', b'e'), parent=b'c', first=3)
    >>> tail_of(shape, [b"a", b"b", b"c", b"d"], 48) is None
    True
    """
    stop = hit_blocks(shape.group, end_tokens).stop
    number = stop // shape.blocks
    first = number * shape.blocks
    names = block_names(hashes, shape.group, first, stop)
    if first == stop or len(names) < stop - first:
        return None
    parent = hashes[first * shape.group.units - 1] if first else None
    return ObjectNames(number, tuple(names), parent, first)


def object_at(
    shape: ObjectShape, hashes: Sequence[BlockHash], boundary_tokens: int, unit_tokens: int
) -> ObjectNames | None:
    """The object of a window or a state at a boundary; ``None`` if its blocks are not all hashed.

    It is numbered like the run that it ends in, of ``unit_tokens``, and has nothing before it.

    >>> window = Group(0, GroupKind.SLIDING_WINDOW, 16, 1, (), window_tokens=20)
    >>> object_at(object_shape(window, 0), [b"a", b"b", b"c", b"d"], 64, 32)
    ObjectNames(number=1, names=(b'c', b'd'), parent=None, first=2)
    """
    needed = hit_blocks(shape.group, boundary_tokens)
    names = block_names(hashes, shape.group, needed.start, needed.stop)
    if not names or len(names) < len(needed):
        return None
    number = -(-boundary_tokens // unit_tokens) - 1
    return ObjectNames(number, tuple(names), None, needed.start)


class Reach(NamedTuple):
    """A boundary to resume at, and where the prefix ends whose objects that takes.

    They differ for a prompt that ends with a block: what is stored goes up to its end, and its last
    token is computed again.
    """

    resume_tokens: int
    end_tokens: int


NO_REACH: Final = Reach(0, 0)


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """The objects of all groups of an engine, and where a store's hits end.

    Prefixes share whole objects, so at multiples of ``unit_tokens`` any of them can be resumed;
    between these, at boundaries where one has ended, a tail is stored.
    """

    dense: tuple[ObjectShape, ...]
    """Of full attention, in runs."""
    sparse: tuple[ObjectShape, ...]
    """Of windows and states."""
    unit_tokens: int
    align_tokens: int = 1
    """Boundaries are multiples of this."""
    proof_tokens: int = 0
    """What has to be hashed beyond a boundary for a hit there."""

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
        proof = max(group.proof_blocks * group.block_tokens for group in groups)
        return cls(dense, sparse, math.lcm(align, *whole), align, proof)

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
        """The highest multiple of ``unit_tokens`` at or below ``tokens``."""
        return tokens // self.unit_tokens * self.unit_tokens

    def above(self, tokens: int) -> int:
        """The lowest multiple of ``unit_tokens`` at or above ``tokens``."""
        return -(-tokens // self.unit_tokens) * self.unit_tokens

    def end(self, num_tokens: int, hashed_tokens: int) -> int:
        """The boundary at which a prefix of ``num_tokens`` ends, as far as it is hashed."""
        tokens = max(0, min(num_tokens, hashed_tokens - self.proof_tokens))
        return tokens // self.align_tokens * self.align_tokens

    def top(self, num_tokens: int, hashed_tokens: int) -> Reach:
        """Where a prompt of ``num_tokens`` is resumed if all that was stored of it is there.

        >>> plan = ObjectPlan.of([Group(0, GroupKind.FULL_ATTENTION, 16, 1, ())], 64)
        >>> plan.top(47, 47), plan.top(48, 48)
        (Reach(resume_tokens=32, end_tokens=32), Reach(resume_tokens=32, end_tokens=48))
        """
        resume = self.end(num_tokens - 1, hashed_tokens)
        return Reach(resume, self.end(num_tokens, hashed_tokens))

    def run(
        self, shape: ObjectShape, hashes: Sequence[BlockHash], first: int, reach: Reach
    ) -> list[ObjectNames]:
        """The objects of full attention from number ``first`` on that a resume there reads."""
        whole = hit_blocks(shape.group, reach.end_tokens).stop // shape.blocks
        objects = objects_of(shape, hashes, first, whole)
        tail = tail_of(shape, hashes, reach.end_tokens) if first <= whole else None
        needed = hit_blocks(shape.group, reach.resume_tokens).stop
        return [each for each in (*objects, *([tail] if tail else [])) if each.first < needed]

    def ending(self, hashes: Sequence[BlockHash], end_tokens: int) -> Iterator[WantedObject]:
        """What is stored of a prefix because it ends there: tails, windows and states."""
        for shape in self.dense:
            tail = tail_of(shape, hashes, end_tokens)
            if tail is not None:
                yield WantedObject(shape, tail)
        yield from self.at(hashes, end_tokens)

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
