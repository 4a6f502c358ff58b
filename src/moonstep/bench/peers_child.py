"""The child process of ``moonstep bench peers``: one engine that answers each prompt once.

python -m moonstep.bench.peers_child FD < plan.json
"""

from __future__ import annotations

import time
from typing import Any, Final

from moonstep.bench.peers_plan import STOCK, PeerPlan
from moonstep.demo.child import Emit, run_child
from moonstep.demo.prompts import make_prompts
from moonstep.demo.session import Session

_SEED_PROMPTS: Final = 1
_SEED_WARM_UP: Final = 2
_SETTLE_S: Final = 60.0


class _DoneEvent:
    """``torch.cuda.Event`` where there is no stream: all work before it is done when it is made."""

    def record(self, stream: Any = None) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def measure(raw: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Time to the first token of each prompt, and until everything has reached the store."""
    plan = PeerPlan.from_json(raw)
    if plan.connector == STOCK:
        import torch

        torch.cuda.Event = _DoneEvent
    session = Session(plan)
    try:
        (warm_up,) = make_prompts(
            session.encode, count=1, tokens=plan.prompt_tokens, seed=_SEED_WARM_UP
        )
        prompts = make_prompts(
            session.encode, count=plan.prompt_count, tokens=plan.prompt_tokens, seed=_SEED_PROMPTS
        )
        session.answer(warm_up, plan.answer_tokens)
        session.settle(_SETTLE_S)
        answers = []
        for done, prompt in enumerate(prompts):
            emit("prompts", done, len(prompts))
            answers.append(session.answer(prompt, plan.answer_tokens))
        start_s = time.perf_counter()
        session.settle(_SETTLE_S)
        settle_s = time.perf_counter() - start_s
    finally:
        session.close()
    return {
        "start_s": session.start_s,
        "settle_s": settle_s,
        "first_token_s": [answer.first_token_s for answer in answers],
        "tokens": [answer.tokens for answer in answers],
    }


if __name__ == "__main__":
    run_child(measure)
