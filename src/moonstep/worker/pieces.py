"""Where the bytes of a block lie: in the engine's KV memory, and in a slot.

A block of one group is made of *pieces*: runs of bytes that are contiguous within the block and
that come again, one block stride further, in the next block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOT_ALIGN_BYTES: Final = 64
"""Slots start on cache lines, so that no two of them share one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of bytes of every block of a group.

    Block ``b`` has its ``nbytes`` at ``address + b * block_stride_bytes`` in the engine's memory
    and at ``slot_offset`` within the block's slot.
    """

    address: int
    block_stride_bytes: int
    nbytes: int
    slot_offset: int


def block_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of a slot that one block of a group with these pieces takes up.

    >>> block_bytes([Piece(0, 32, 8, 0), Piece(512, 32, 4, 8)])
    12
    """
    return max((piece.slot_offset + piece.nbytes for piece in pieces), default=0)


def slot_bytes(groups: Sequence[Sequence[Piece]]) -> int:
    """Bytes of a slot: room for a block of the largest group, up to the next cache line.

    >>> slot_bytes([[Piece(0, 32, 8, 0)], [Piece(0, 128, 100, 0)]])
    128
    """
    largest = max((block_bytes(pieces) for pieces in groups), default=0)
    return -(-largest // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
