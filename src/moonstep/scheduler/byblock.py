"""What is known of the engine's blocks, noted and asked for many of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moonstep.scheduler.columns import numbers


class ByBlock:
    """A value for each block, by the block's number; ``None`` where nothing is known.

    An array, since the blocks of a step lie scattered among very many, and an array costs one touch
    of memory each.
    """

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: npt.NDArray[np.object_] = np.full(0, None, dtype=object)

    def reserve(self, count: int) -> None:
        """Make room for numbers below ``count``."""
        if count > len(self._of):
            longer = np.full(max(count, 2 * len(self._of)), None, dtype=object)
            longer[: len(self._of)] = self._of
            self._of = longer

    def get(self, blocks: Sequence[int]) -> list[Any]:
        """What is known of each of ``blocks``."""
        if not blocks:
            return []
        self.reserve(max(blocks) + 1)
        known: list[Any] = self._of[numbers(blocks)].tolist()
        return known

    def put(self, blocks: Sequence[int], values: Sequence[Any]) -> None:
        """Note the value beside each of ``blocks``."""
        if blocks:
            self.reserve(max(blocks) + 1)
            self._of[numbers(blocks)] = np.fromiter(values, object, len(values))

    def drop(self, blocks: Sequence[int]) -> None:
        """Forget what is known of ``blocks``."""
        if blocks:
            self.reserve(max(blocks) + 1)
            self._of[numbers(blocks)] = None

    def clear(self) -> None:
        """Forget everything."""
        self._of.fill(None)
