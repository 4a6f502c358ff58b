"""A KV-cache group, and what kinds there are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """What a group's layers need in order to go on from a boundary.

    Compressed latents (MLA) and layers of one type but different sizes need what full attention
    needs, and are of that kind.
    """

    FULL_ATTENTION = "full attention"
    SLIDING_WINDOW = "sliding window"
    RECURRENT_STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group as both halves see it.

    ``index`` is the engine's number of the group, ``block_tokens`` the tokens of one block and
    ``block_bytes`` its bytes on one rank. ``hash_tokens`` is the engine's hash unit, of which
    ``block_tokens`` is a multiple; left out, it is the block. A sliding window of ``window_tokens``
    tokens counts the token that is computed: ``window_tokens - 1`` tokens before it are read.
    ``draft`` marks a group in which the engine drops the last block of a hit, because it is, or may
    be, of a drafter's layers.

    Raises:
        ValueError: the numbers do not fit each other.
    """

    index: int
    kind: GroupKind
    block_tokens: int
    block_bytes: int
    layer_names: tuple[str, ...]
    hash_tokens: int = 0
    window_tokens: int = 0
    draft: bool = False

    def __post_init__(self) -> None:
        if not self.hash_tokens:
            object.__setattr__(self, "hash_tokens", self.block_tokens)
        if self.block_tokens % self.hash_tokens:
            raise ValueError(f"blocks of {self.block_tokens} tokens, hashes of {self.hash_tokens}")
        is_window = self.kind is GroupKind.SLIDING_WINDOW
        if is_window != (self.window_tokens > 0) or self.window_tokens == 1:
            raise ValueError(f"a window of {self.window_tokens} tokens for {self.kind.value}")

    @property
    def units(self) -> int:
        """Hash units in one block."""
        return self.block_tokens // self.hash_tokens

    @property
    def window_blocks(self) -> int:
        """The most blocks that a resume reads of a sliding window; 0 for other kinds."""
        return -(-(self.window_tokens - 1) // self.block_tokens) if self.window_tokens else 0

    @property
    def proof_blocks(self) -> int:
        """Blocks beyond a boundary that have to be present for a hit there: 1 with drafts.

        A draft layer's last entry of a block depends on the token after it, which only the next
        block's hash covers. Recurrent layers are never a drafter's.
        """
        return int(self.draft and self.kind is not GroupKind.RECURRENT_STATE)


def last_boundary_tokens(num_tokens: int, block_tokens: int) -> int:
    """The highest block boundary at which a request of ``num_tokens`` tokens may resume.

    The engine has to compute at least the last token itself: a promise of the whole length ends it
    (vLLM 0.32.0, ``Scheduler.schedule``, the assertion on ``num_new_tokens``).

    >>> [last_boundary_tokens(n, 16) for n in (1, 16, 17, 32, 33)]
    [0, 0, 16, 16, 32]
    """
    return (num_tokens - 1) // block_tokens * block_tokens
