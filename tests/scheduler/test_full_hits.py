"""Prompts that are present whole, in the real scheduler: the last token is never promised."""

from __future__ import annotations

from typing import Literal

import pytest

from moonstep.audit.history import Reset
from moonstep.audit.shape import Shape
from tests.scheduler.engine import open_engine

BLOCK = 16


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("local", ["none", "all aligned", "all but one block"])
@pytest.mark.parametrize("tokens", [16, 17, 31, 32, 33, 48])
def test_a_full_hit_goes_on_from_the_last_boundary_below_its_end(
    runner: Literal["v1", "v2"], local: str, tokens: int
) -> None:
    shape = Shape(runner=runner, block_tokens=BLOCK, blocks=16, max_tokens=96, budget_tokens=96)
    boundary = (tokens - 1) // BLOCK * BLOCK
    with open_engine(shape) as watched:
        watched.run(id="seed", family=1, tokens=tokens + 20, shared=tokens, output=2)
        local_tokens = boundary
        if local != "all aligned":
            watched.apply(Reset())
            local_tokens = 0
        if local == "all but one block" and boundary > BLOCK:
            local_tokens = boundary - BLOCK
            watched.run(id="shorter", family=1, tokens=local_tokens + 1, shared=local_tokens)
        restored = watched.run(id="full", family=1, tokens=tokens, shared=tokens, output=20)
        assert restored == boundary - local_tokens
        assert watched.engine.clients.by_id["full"].received == 20
