"""Prompts of an exact number of tokens, the same ones in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

_WHO: Final = ("The harbour master", "A gardener", "The night train", "Our neighbour", "The tide")
_DID: Final = (
    "counted",
    "carried",
    "repaired",
    "noticed",
    "waited for",
    "wrote down",
    "left behind",
)
_WHAT: Final = ("seven lanterns", "the old map", "a blue door", "the last letter", "two bridges")
_WHEN: Final = ("before dawn", "at noon", "after the rain", "in the third week", "on a quiet day")


def make_prompts(
    encode: Callable[[str], list[int]], *, count: int, tokens: int, seed: int
) -> list[list[int]]:
    """``count`` token lists of exactly ``tokens`` each, which differ from their first line on.

    ``encode`` turns text into token ids. Plain sentences rather than random ids: a model that is
    sure of its next token gives the same one whatever the shape of the batch.
    """
    return [_make_prompt(encode, tokens, seed * 1000 + index) for index in range(count)]


def _make_prompt(encode: Callable[[str], list[int]], tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    lines = [f"Report number {seed}."]
    # No sentence has fewer than eight tokens, so this many are always enough.
    for number in range(1, tokens // 8 + 2):
        words = (rng.choice(_WHO), rng.choice(_DID), rng.choice(_WHAT), rng.choice(_WHEN))
        lines.append(f"{number}. {' '.join(words)}.")
    ids = encode("\n".join(lines))
    if len(ids) < tokens:
        raise ValueError(f"a prompt of {tokens} tokens was asked for, the text gave {len(ids)}")
    return ids[:tokens]
