"""Names of a group's blocks, from the engine's hashes of a request's hash units.

Each hash is chained over the whole prefix, so the hash of a block's last unit names the block.
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
