"""Names of a group's blocks, from the engine's hashes of a request's hash units.

Each hash is chained over the whole prefix, so the hash of a block's last unit names the block. The
engine's pool keeps it with the group's number behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonstep.engine import BlockHash
from moonstep.groups.group import Group


def block_names(
    hashes: Sequence[BlockHash], group: Group, start: int = 0, stop: int | None = None
) -> Sequence[BlockHash]:
    """Names of the group's whole blocks at positions ``[start, stop)``, as far as hashed.

    Copies only what is asked for: a step asks for the positions that are new in it.

    >>> from moonstep.groups import GroupKind
    >>> group = Group(0, GroupKind.FULL_ATTENTION, 32, 1, (), hash_tokens=16)
    >>> block_names([b"a", b"b", b"c", b"d", b"e"], group), block_names([b"a", b"b"], group, 1)
    ([b'b', b'd'], [])
    """
    units = group.units
    last = len(hashes) if stop is None else min(stop * units, len(hashes))
    return hashes[start * units + units - 1 : last : units]


def tail_name(hashes: Sequence[BlockHash], group: Group, boundary_tokens: int) -> BlockHash:
    """The name of what ends at ``boundary_tokens``, a multiple of the hash unit, not 0.

    >>> from moonstep.groups import GroupKind
    >>> group = Group(0, GroupKind.RECURRENT_STATE, 64, 1, (), hash_tokens=16)
    >>> tail_name([b"a", b"b", b"c"], group, 48)
    b'c'
    """
    return hashes[boundary_tokens // group.hash_tokens - 1]


def pool_suffix(group: Group) -> bytes:
    """What follows a name where the engine's pool keeps it: the group's number.

    >>> from moonstep.groups import GroupKind
    >>> pool_suffix(Group(3, GroupKind.FULL_ATTENTION, 16, 1, ()))
    b'\\x00\\x00\\x00\\x03'
    """
    return group.index.to_bytes(4, "big")
