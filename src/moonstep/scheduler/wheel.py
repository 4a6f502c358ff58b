"""When to look at a life again: the earliest step in which it can fill a block.

A running request fills a block every so many steps. Instead of asking each of them in each step,
each life is entered under the step in which it can next have something to keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Due(Protocol):
    """What stands in a wheel: it knows the step it is entered under, or 0."""

    due_step: int


T = TypeVar("T", bound=Due)


class Wheel(Generic[T]):
    """Lives by the step in which they are due. An entry costs O(1) in and out."""

    def __init__(self) -> None:
        self._by_step: defaultdict[int, list[T]] = defaultdict(list)
        self.has_due: Callable[[int], bool] = self._by_step.__contains__
        """Whether anything was entered under a step; asked in every one, so nothing but C."""

    def enter(self, item: T, step: int) -> None:
        """Make ``item`` due in ``step``; an earlier entry of it no longer counts."""
        item.due_step = step
        self._by_step[step].append(item)

    def leave(self, item: T) -> None:
        """``item`` is due no more."""
        item.due_step = 0

    def due(self, step: int) -> list[T]:
        """Take out what is due in ``step``, in the order entered. Every step asks once."""
        due: list[T] = []
        for item in self._by_step.pop(step, ()):
            if item.due_step == step:
                item.due_step = 0
                due.append(item)
        return due


def steps_to_fill(missing_tokens: int, tokens_per_decode: int) -> int:
    """How many steps at least until a decode has computed ``missing_tokens`` more tokens.

    A step computes at most ``tokens_per_decode`` of them: one and the drafts. (A prefill may get
    any number in a step.)

    >>> [steps_to_fill(n, tokens_per_decode=2) for n in (0, 1, 2, 3, 16)]
    [1, 1, 1, 2, 8]
    """
    return max(1, -(-missing_tokens // tokens_per_decode))
