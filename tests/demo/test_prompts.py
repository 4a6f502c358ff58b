"""Prompts of an exact length that differ from their first line on."""

from __future__ import annotations

from moonstep.demo.prompts import make_prompts


def encode(text: str) -> list[int]:
    """A token a word: fewer than any tokenizer makes."""
    return [hash(word) for word in text.split() for _ in range(2)]


def test_prompts_have_the_length_asked_for_and_differ_early() -> None:
    prompts = make_prompts(encode, count=4, tokens=500, seed=1)
    assert [len(prompt) for prompt in prompts] == [500] * 4
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 4


def test_the_same_seed_makes_the_same_prompts() -> None:
    assert make_prompts(encode, count=2, tokens=90, seed=7) == make_prompts(
        encode, count=2, tokens=90, seed=7
    )
