"""What the demo's programme asks of an engine: which prompts come back, and where they are then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moonstep.demo.child import measure
from moonstep.demo.plan import DemoPlan
from moonstep.demo.probe import ConnectorTotals
from moonstep.demo.session import Answer, Prompt, StormResult


class Memory:
    """A session whose engine remembers whole prompts, as many as fit; it answers nothing."""

    start_s = 0.0

    def __init__(self, plan: DemoPlan) -> None:
        self._blocks, self._block_tokens = plan.kv_blocks - 1, plan.block_tokens
        self._held: list[tuple[int, ...]] = []
        self.was_held: list[bool] = []
        """Of each prompt that was answered, or came in beside another, in this order."""
        self.beside: list[bool] = []

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def answer(self, prompt: Prompt, answer_tokens: int) -> Answer:
        self.was_held.append(self._visit(prompt))
        return Answer(0.1, 0.1, (1,), ConnectorTotals())

    def token_gaps(
        self, steady: Prompt, returning: Sequence[Prompt], spacing_tokens: int, answer_tokens: int
    ) -> list[float]:
        self.beside += [self._visit(prompt) for prompt in returning]
        return [0.1]

    def storm(
        self, prompts: Sequence[Prompt], answer_tokens: int, tick: Callable[[int], None]
    ) -> StormResult:
        return StormResult(0.1, (), 0, ConnectorTotals())

    def _visit(self, prompt: Prompt) -> bool:
        name = tuple(prompt)
        was_held = name in self._held
        self._held = [one for one in self._held if one != name] + [name]
        while sum(-(-len(one) // self._block_tokens) for one in self._held) > self._blocks:
            del self._held[0]
        return was_held


@pytest.mark.parametrize(("returns", "beside"), [(5, 2), (1, 1), (3, 1)])
def test_what_comes_back_has_been_given_away_and_the_floor_has_not(
    returns: int, beside: int
) -> None:
    plan = DemoPlan("", with_moonstep=True, cpus=(), return_count=returns, gap_returns=beside)
    session: Any = Memory(plan)
    raw = measure(session, plan, lambda *_: None)
    visits = [False] * (1 + plan.prompt_count) + [False, True] * returns
    assert session.was_held == visits
    assert session.beside == [False] * beside + [True]
    assert len(raw["returns"]) == len(raw["immediate_repeats"]) == returns
