"""Conversations that take turns in a seeded order: what is sent when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def turn_order(conversations: int, turns: int, seed: int) -> list[int]:
    """Which conversation speaks next: each ``turns`` times, in a random order.

    >>> sorted(turn_order(2, 3, seed=1))
    [0, 0, 0, 1, 1, 1]
    """
    order = [number for number in range(conversations) for _ in range(turns)]
    random.Random(seed).shuffle(order)
    return order


class Conversation:
    """What has been said, and what its user will say, as token ids."""

    def __init__(self, user_turns: Sequence[list[int]]) -> None:
        self._said: list[int] = []
        self._user_turns: Iterator[list[int]] = iter(user_turns)

    def next_prompt(self) -> list[int]:
        """All that was said and the user's next turn.

        Raises:
            StopIteration: the user has nothing more to say.
        """
        self._said = [*self._said, *next(self._user_turns)]
        return self._said

    def hear(self, answer: Sequence[int]) -> None:
        """The model has answered."""
        self._said = [*self._said, *answer]
