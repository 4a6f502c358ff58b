"""Objects of a store: which blocks of a prefix each of them is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonstep.engine import BlockHash
from moonstep.groups import Group


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """How long the objects of a group are: ``blocks`` blocks each, the last one names it."""

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
    """One object of a prefix: its number in it, its blocks' names, the name of the one before."""

    number: int
    names: tuple[BlockHash, ...]
    parent: BlockHash | None

    @property
    def name(self) -> BlockHash:
        return self.names[-1]


def object_shape(group: Group, chunk_tokens: int) -> ObjectShape:
    """Objects of about ``chunk_tokens`` tokens, at least one block.

    >>> from moonstep.groups import GroupKind
    >>> group = Group(0, GroupKind.FULL_ATTENTION, 128, 1, ())
    >>> [object_shape(group, tokens).blocks for tokens in (64, 256, 300)]
    [1, 2, 2]
    """
    return ObjectShape(group, max(1, chunk_tokens // group.block_tokens))


def objects_of(
    shape: ObjectShape, names: Sequence[BlockHash], first: int, stop: int
) -> list[ObjectNames]:
    """The whole objects numbered ``[first, stop)`` of the prefix that ``names`` are the blocks of.

    >>> from moonstep.groups import GroupKind
    >>> shape = ObjectShape(Group(0, GroupKind.FULL_ATTENTION, 16, 1, ()), 2)
    >>> [(o.names, o.parent) for o in objects_of(shape, [b"a", b"b", b"c", b"d", b"e"], 0, 9)]
    [((b'a', b'b'), None), ((b'c', b'd'), b'b')]
    """
    size = shape.blocks
    return [
        ObjectNames(
            number,
            tuple(names[number * size : (number + 1) * size]),
            names[number * size - 1] if number else None,
        )
        for number in range(first, min(stop, len(names) // size))
    ]
